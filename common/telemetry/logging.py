"""Structured logs: one line per lifecycle event or fault, never prompt or token text.

Owns: the set-up of structlog and of the standard library's loggers. Called once by each `main.py`.
"""

import logging
import sys
from typing import Literal, TextIO, cast

import structlog

Level = Literal["debug", "info", "warning", "error"]


def configure_logging(role: str, json: bool = False, level: Level = "info") -> None:
    """Send every log line of this process to stderr, as JSON or for a person's eyes, each marked with `role`."""
    stream = cast("TextIO", _Stderr())
    threshold = logging.getLevelNamesMapping()[level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _marker(role),
    ]
    renderer: list[structlog.typing.Processor]
    if json:
        # Frames are shown without their locals: those hold prompts.
        frames = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        renderer = [structlog.processors.ExceptionRenderer(frames), structlog.processors.JSONRenderer()]
    else:
        plain = structlog.dev.plain_traceback
        renderer = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
    structlog.configure(
        processors=[*shared, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
        cache_logger_on_first_use=True,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer]
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    # Third parties speak up from WARNING on; our own lines go through structlog.
    root.setLevel(max(threshold, logging.WARNING))


class _Stderr:
    """Whatever `sys.stderr` is at the moment of writing; it may be exchanged after loggers were made."""

    def write(self, text: str) -> int:
        """Write to it."""
        return sys.stderr.write(text)

    def flush(self) -> None:
        """Flush it."""
        sys.stderr.flush()


def _marker(role: str) -> structlog.typing.Processor:
    def mark(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        """Name the role in the line."""
        event["role"] = role
        return event

    return mark

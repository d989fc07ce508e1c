"""Find, check and build custom logits processors at the start of an engine.

Owns: the two ways to name one (`module:Class` in the config, entry points of installed packages) and one clear line for
each way that can go wrong. Does not know what they do.
"""

from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from common.engine.sampling.processors.processor import LogitsProcessor, ProcessorContext
from common.errors import StartupError

ENTRY_POINT_GROUP = "pd_serve.logits_processors"


def load_processors(
    paths: Sequence[str], installed: Iterable[EntryPoint] | None = None
) -> tuple[type[LogitsProcessor], ...]:
    """Classes of all custom processors, installed ones first, each once.

    Args:
        paths: `module:Class`, from the config.
        installed: entry points to load; None looks the group up in the environment.

    Raises:
        StartupError: one cannot be imported or is no `LogitsProcessor`.
    """
    group = entry_points(group=ENTRY_POINT_GROUP) if installed is None else installed
    named = [(f"entry point {point.name} = {point.value}", point.value) for point in group]
    named += [(path, path) for path in paths]
    return tuple(dict.fromkeys(_load(name, path) for name, path in named))


def build_processors(
    classes: Iterable[type[LogitsProcessor]], context: ProcessorContext
) -> tuple[LogitsProcessor, ...]:
    """One instance of each.

    Raises:
        StartupError: a constructor failed.
    """
    return tuple(_build(processor, context) for processor in classes)


def _load(name: str, path: str) -> type[LogitsProcessor]:
    module_name, _, class_name = path.partition(":")
    if not module_name or not class_name:
        raise StartupError(f"logits processor {name}: write it as module:Class")
    try:
        found: object = import_module(module_name)
        for part in class_name.split("."):
            found = getattr(found, part)
    except Exception as error:  # foreign code runs on import; whatever it raises is why we cannot start
        raise StartupError(f"logits processor {name}: {type(error).__name__}: {error}") from error
    if not isinstance(found, type) or LogitsProcessor not in found.__mro__:
        raise StartupError(f"logits processor {name}: is no subclass of {LogitsProcessor.__module__}:LogitsProcessor")
    return found


def _build(processor: type[LogitsProcessor], context: ProcessorContext) -> LogitsProcessor:
    name = f"{processor.__module__}:{processor.__qualname__}"
    constructor: type = processor
    try:
        built: LogitsProcessor = constructor(context)
    except Exception as error:  # foreign code; whatever it raises is why we cannot start
        raise StartupError(f"logits processor {name}: {type(error).__name__}: {error}") from error
    return built

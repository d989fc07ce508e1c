"""The life of an engine process: bind, load, warm up, serve, drain.

Owns: the order, and the log line of each step. Does not know: roles; a role's `role.py` brings its own.
"""

import asyncio
import os
import signal
import ssl
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread
from typing import Any, Protocol

import structlog

from common.clock import SystemClock
from common.serving.app import AppSettings, build_app
from common.serving.server import HttpServer
from common.serving.surface import Parts, Surface
from common.serving.tracing import EngineTraces, ThreadedCollector
from common.serving.warm_up import warm_up
from common.tasks import Supervisor, only_cause, wait_for_signal
from common.telemetry.logging import Level, configure_logging
from common.telemetry.metrics import Metrics
from common.tracing.exporter import TraceExporter

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """What every engine process needs.

    Attributes:
        role: `prefill` or `decode`.
        host: to listen on.
        port: to listen on; 0 lets the system choose.
        max_body_bytes: larger bodies answer 413.
        api_key: what clients must present; None lets everyone in.
        drain_s: how long requests may finish after a signal.
        log_json: log lines as JSON.
        log_level: lowest level shown.
        otlp_url: where spans of traced requests go; None makes none.
        tls: of the HTTP port; None serves plain HTTP.
    """

    role: str
    host: str
    port: int
    max_body_bytes: int
    api_key: str | None
    drain_s: float
    log_json: bool
    log_level: Level
    otlp_url: str | None = None
    tls: ssl.SSLContext | None = None


class RunningRole(Protocol):
    """A loaded engine with everything around it."""

    @property
    def parts(self) -> Parts:
        """What the routes use."""
        ...

    async def start(self) -> None:
        """Start its threads; the running loop is the one its outputs go to."""
        ...

    async def close(self) -> None:
        """End them. Requests that are still open end with an error."""
        ...


class Role(Protocol):
    """A role as its `role.py` describes it."""

    @property
    def process(self) -> ProcessSettings:
        """Its process."""
        ...

    def load(self, engine_id: str, port: int, metrics: Metrics) -> RunningRole:
        """Build everything; blocks for seconds, called off the event loop. Raises `StartupError`."""
        ...


async def serve(role: Role) -> None:
    """Set up the process's log, then `serve_until_signal`."""
    configure_logging(role.process.role, role.process.log_json, role.process.log_level)
    await serve_until_signal(role)


async def serve_until_signal(role: Role) -> None:
    """Bind, load, warm up, serve, drain; signals are watched from the first moment to the last.

    Raises:
        StartupError: the port cannot be had, or the role cannot be loaded.
    """
    try:
        async with asyncio.TaskGroup() as group:
            signalled = group.create_task(wait_for_signal())
            await _live(role, signalled)
            signalled.cancel()
    except BaseExceptionGroup as failures:
        raise only_cause(failures) from failures


async def _live(role: Role, signalled: asyncio.Task[signal.Signals]) -> None:
    settings, surface, metrics = role.process, Surface(), Metrics()
    engine_id = f"{settings.role}-{uuid.uuid4().hex[:12]}"
    app_settings = AppSettings(
        role=settings.role,
        engine_id=engine_id,
        max_body_bytes=settings.max_body_bytes,
        api_key=settings.api_key,
    )
    exporter = _exporter(settings)
    traces = None if exporter is None else EngineTraces(settings.role, exporter, SystemClock())
    app = build_app(surface, metrics, app_settings, traces)
    server = HttpServer(app, settings.host, settings.port, settings.drain_s, settings.tls)
    await server.start()
    is_tls = settings.tls is not None
    _log.info("engine.listening", host=settings.host, port=server.port, tls=is_tls, engine_id=engine_id)
    try:
        running = await _loaded(lambda: role.load(engine_id, server.port, metrics), signalled)
        try:
            await running.start()
            await warm_up(running.parts)
            surface.open(running.parts)
            model = running.parts.model
            _log.info("engine.ready", model=model.name, max_model_len_tokens=model.max_model_len_tokens)
            async with Supervisor() as background:
                if exporter is not None:
                    background.spawn(exporter.run(), name="traces")
                received = await signalled
            _log.info("engine.draining", signal=received.name)
            surface.drain()
            await server.close()
            if exporter is not None:
                await exporter.flush()
        finally:
            await running.close()
    finally:
        await server.close()
    _log.info("engine.stopped")


def _exporter(settings: ProcessSettings) -> TraceExporter | None:
    if settings.otlp_url is None:
        return None
    return TraceExporter(ThreadedCollector(settings.otlp_url), f"pd-{settings.role}", SystemClock())


async def _loaded(load: Callable[[], RunningRole], signalled: asyncio.Task[signal.Signals]) -> RunningRole:
    """Run `load` on a thread of its own; a signal meanwhile ends the process at once."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[RunningRole] = loop.create_future()

    def work() -> None:
        """On the thread: load, and hand over what came of it."""
        try:
            loaded = load()
        except BaseException as error:  # noqa: BLE001 - carried over to the event loop as it is
            loop.call_soon_threadsafe(outcome.set_exception, error)
        else:
            loop.call_soon_threadsafe(outcome.set_result, loaded)

    Thread(target=work, name="load", daemon=True).start()
    first_of: set[asyncio.Future[Any]] = {signalled, outcome}
    await asyncio.wait(first_of, return_when=asyncio.FIRST_COMPLETED)
    if not outcome.done():
        _log.info("engine.stopped", during="loading")
        # Reading weights cannot be interrupted and holds nothing that needs to be given back.
        sys.stderr.flush()
        os._exit(0)
    return outcome.result()

"""A running proxy: listening, watching its fleet, and going down without breaking what is under way.

Owns: the order of start and stop, and what a reload can change. Does not know: settings files, signals.
"""

import asyncio
import resource
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import structlog

from common.clock import Clock
from common.config.tls import server_context
from common.errors import StartupError
from common.tasks import Supervisor
from proxy.admission import Admission
from proxy.assembly import Assembled, assemble
from proxy.config import ProxyConfig
from proxy.fleet.health import Monitor
from proxy.fleet.membership import Source
from proxy.fleet.worker import Role
from proxy.http1.server import HttpServer
from proxy.services import Services
from proxy.upstream import Upstream

_log = structlog.get_logger(__name__)
_LAG_PROBE_S = 0.25
_RELOADABLE = ("fleet", "keys")


def allow_many_sockets() -> None:
    """Raise this process's limit of open files as far as it may: every stream holds two sockets."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class RunningProxy:
    """What a caller may want to know of a started proxy, and do with it.

    Args:
        assembled: its collaborators.
        port: where it listens.
    """

    def __init__(self, assembled: Assembled, port: int) -> None:
        self._assembled = assembled
        self.port = port

    @property
    def services(self) -> Services:
        """Collaborators of the journeys."""
        return self._assembled.services

    @property
    def paths(self) -> Mapping[str, frozenset[str]]:
        """What can be asked: path → methods."""
        return self._assembled.app.paths

    def reload(self, config: ProxyConfig) -> None:
        """Take over the lists of engines and the key files of `config`; everything else needs a restart.

        Raises:
            ConfigError: a key file cannot be used; the old keys stay.
        """
        self._assembled.clients.reload()
        self._assembled.admins.reload()
        urls = {Role.PREFILL: config.fleet.prefill, Role.DECODE: config.fleet.decode}
        self.services.fleet.apply(Source.CONFIG, urls)
        old = self.services.config
        changed = [name for name in ProxyConfig.__struct_fields__ if getattr(old, name) != getattr(config, name)]
        waiting = [name for name in changed if name not in _RELOADABLE]
        _log.info("proxy.reloaded", needs_restart=waiting)


@asynccontextmanager
async def running(
    config: ProxyConfig, clock: Clock, *, reuse_port: bool = False, shared_file: Path | None = None
) -> AsyncIterator[RunningProxy]:
    """A proxy that serves while the block runs and drains when it is left.

    Args:
        config: the settings.
        clock: its clock.
        reuse_port: share the port with sibling processes.
        shared_file: what this process is known by among them.

    Raises:
        StartupError: the port cannot be had.
        ConfigError: a file that the settings name cannot be used.
    """
    tls = server_context(config.tls, "proxy.tls")
    async with AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(
            Upstream(connect_s=config.timeouts.connect_s, keepalive_s=config.keepalive_s)
        )
        background = await stack.enter_async_context(Supervisor())
        assembled = assemble(config, clock, upstream, background, shared_file)
        if assembled.siblings is not None:
            await stack.enter_async_context(assembled.siblings.listening())
        server = await stack.enter_async_context(
            HttpServer(assembled.app.handle, clock, max_body_bytes=config.max_body_bytes, head_s=config.timeouts.body_s)
        )
        port = await _listen(server, config, tls, reuse_port=reuse_port)
        _watch(assembled)
        _log.info("proxy.listening", host=config.host, port=port, tls=tls is not None)
        yield RunningProxy(assembled, port)
        await _drain(server, assembled.services.admission, config.drain_s)
        if assembled.services.traces is not None:
            await assembled.services.traces.flush()


def _watch(assembled: Assembled) -> None:
    services = assembled.services
    config = services.config
    headers = {} if config.engine_api_key is None else {"Authorization": f"Bearer {config.engine_api_key}"}
    monitor = Monitor(services.fleet, services.upstream, config.fleet, headers)
    services.background.spawn(monitor.run(), name="health")
    services.background.spawn(_watch_lag(services), name="lag")
    if services.traces is not None:
        services.background.spawn(services.traces.run(), name="traces")
    if services.shared_metrics is not None:
        services.background.spawn(services.shared_metrics.run(), name="metrics")
    for name, source in assembled.sources.items():
        services.background.spawn(source.run(), name=name)


async def _watch_lag(services: Services) -> None:
    """How late the event loop comes to what is due while it serves: the delay that it adds to everybody's bytes."""
    while True:
        await services.admission.wait_busy()
        due_s = services.clock.now_s() + _LAG_PROBE_S
        await asyncio.sleep(_LAG_PROBE_S)
        services.metrics.loop_lag.observe(max(0.0, services.clock.now_s() - due_s))


async def _listen(server: HttpServer, config: ProxyConfig, tls: ssl.SSLContext | None, *, reuse_port: bool) -> int:
    try:
        return await server.listen(config.host, config.port, tls=tls, reuse_port=reuse_port)
    except OSError as error:
        raise StartupError(f"cannot listen on {config.host}:{config.port}: {error.strerror or error}") from error


async def _drain(server: HttpServer, admission: Admission, drain_s: float) -> None:
    """Take no more connections and let the requests that are under way finish, for `drain_s` at most."""
    admission.close()
    server.stop_listening()
    if admission.num_running:
        _log.info("proxy.draining", num_requests=admission.num_running)
    try:
        async with asyncio.timeout(drain_s):
            await admission.wait_idle()
    except TimeoutError:
        _log.warning("proxy.drain_timeout", num_requests=admission.num_running)

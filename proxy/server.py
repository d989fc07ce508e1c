"""A running proxy: listening, watching its fleet, and going down without breaking what is under way.

Owns: the order of start and stop. Does not know: settings files, signals (its caller decides when to stop).
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import Any

import structlog
from aiohttp import web

from common.clock import Clock
from common.errors import StartupError
from common.tasks import Supervisor
from proxy.admission import Admission
from proxy.app import ProxyApp
from proxy.config import Policy, ProxyConfig
from proxy.fleet.health import Monitor
from proxy.fleet.membership import Fleet
from proxy.fleet.worker import Role
from proxy.leg_bodies import LegRules
from proxy.metrics import ProxyMetrics
from proxy.routing.least_loaded import LeastLoaded
from proxy.routing.policy import RoutingPolicy
from proxy.routing.round_robin import RoundRobin
from proxy.services import Services
from proxy.upstream import Upstream

_log = structlog.get_logger(__name__)
_CLOSE_S = 2.0
_BACKLOG = 4096
_MAX_HEADER_BYTES = 64 << 10


class RunningProxy:
    """What a caller may want to know of a started proxy.

    Args:
        services: its collaborators.
        port: where it listens.
    """

    def __init__(self, services: Services, port: int) -> None:
        self.services = services
        self.port = port


def make_policy(name: Policy) -> RoutingPolicy:
    """The policy a config names."""
    if name == "round_robin":
        return RoundRobin()
    return LeastLoaded(Random())


@asynccontextmanager
async def running(config: ProxyConfig, clock: Clock) -> AsyncIterator[RunningProxy]:
    """A proxy that serves while the block runs and drains when it is left.

    Raises:
        StartupError: the port cannot be had.
    """
    async with AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(
            Upstream(connect_s=config.timeouts.connect_s, keepalive_s=config.keepalive_s)
        )
        background = await stack.enter_async_context(Supervisor())
        services = _build(config, clock, upstream, background)
        runner = web.ServerRunner(_server(config, ProxyApp(services)), shutdown_timeout=_CLOSE_S)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        port = await _listen(runner, config)
        headers = {} if config.engine_api_key is None else {"Authorization": f"Bearer {config.engine_api_key}"}
        monitor = Monitor(services.fleet, upstream, config.fleet, headers)
        background.spawn(monitor.run(), name="health")
        _log.info("proxy.listening", host=config.host, port=port)
        yield RunningProxy(services, port)
        await _drain(runner, services.admission, config.drain_s)


def _build(config: ProxyConfig, clock: Clock, upstream: Upstream, background: Supervisor) -> Services:
    fleet = Fleet(config.fleet, clock)
    admission = Admission(config.admission)
    metrics = ProxyMetrics()
    metrics.watch("pd_requests_running", "Requests that hold a slot.", lambda: admission.num_running)
    metrics.watch("pd_proxy_requests_queued", "Requests that wait for a slot.", lambda: admission.num_waiting)
    metrics.watch("pd_proxy_tasks", "Background tasks.", lambda: background.num_tasks)
    rules = LegRules(
        strip_constraint=config.structured_output != "naive",
        constraint_in_prompt=config.constraint_in_prompt,
        stops_on_prefill=config.dialect == "pd",
    )
    policies = {
        Role.PREFILL: make_policy(config.routing.prefill),
        Role.DECODE: make_policy(config.routing.decode),
    }
    return Services(
        config=config,
        rules=rules,
        clock=clock,
        fleet=fleet,
        policies=policies,
        upstream=upstream,
        admission=admission,
        background=background,
        metrics=metrics,
    )


def _server(config: ProxyConfig, app: ProxyApp) -> web.Server:
    def make_request(*parts: Any) -> web.BaseRequest:
        message, payload, protocol, writer, task = parts
        return web.BaseRequest(
            message, payload, protocol, writer, task, asyncio.get_running_loop(), client_max_size=config.max_body_bytes
        )

    # The low-level server: its router and middlewares cost more than all the proxy does before the first leg.
    return web.Server(
        app.handle,
        request_factory=make_request,
        handler_cancellation=True,
        access_log=None,
        logger=logging.getLogger("proxy.http"),
        max_field_size=_MAX_HEADER_BYTES,
    )


async def _listen(runner: web.ServerRunner, config: ProxyConfig) -> int:
    site = web.TCPSite(runner, config.host, config.port, backlog=_BACKLOG)
    try:
        await site.start()
    except OSError as error:
        raise StartupError(f"cannot listen on {config.host}:{config.port}: {error.strerror or error}") from error
    port: int = runner.addresses[0][1]
    return port


async def _drain(runner: web.ServerRunner, admission: Admission, drain_s: float) -> None:
    """Take no more connections and let the requests that are under way finish, for `drain_s` at most."""
    for site in list(runner.sites):
        await site.stop()
    if admission.num_running:
        _log.info("proxy.draining", num_requests=admission.num_running)
    try:
        async with asyncio.timeout(drain_s):
            await admission.wait_idle()
    except TimeoutError:
        _log.warning("proxy.drain_timeout", num_requests=admission.num_running)

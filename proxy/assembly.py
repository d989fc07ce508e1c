"""Puts a proxy together from its settings: every collaborator is made here and in `main.py`, nowhere else.

Owns: who gets what. Does not know: the event loop, signals.
"""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

from common.clock import Clock
from common.config.tls import client_context
from common.tasks import Supervisor
from common.tracing.exporter import TraceExporter
from proxy.access import KeyRing
from proxy.admin_routes import AdminRoutes
from proxy.admission import Admission
from proxy.app import ProxyApp
from proxy.config import Policy, ProxyConfig, TracingConfig
from proxy.fleet.membership import Fleet
from proxy.fleet.sources import FleetSource, make_sources
from proxy.fleet.worker import Role
from proxy.leg_bodies import LegRules
from proxy.metrics import ProxyMetrics
from proxy.orders import Orders
from proxy.routing.grammar_warm import GrammarWarm
from proxy.routing.least_loaded import LeastLoaded
from proxy.routing.policy import RoutingPolicy
from proxy.routing.prefix_affinity import PrefixAffinity
from proxy.routing.prompt_memory import PromptMemory
from proxy.routing.round_robin import RoundRobin
from proxy.running_requests import RunningRequests
from proxy.services import Services
from proxy.shared_metrics import SharedMetrics
from proxy.siblings import Siblings
from proxy.time_limits import TimeLimits
from proxy.tracing.collector import HttpCollector
from proxy.upstream import Upstream


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """A proxy that is not running yet."""

    services: Services
    app: ProxyApp
    clients: KeyRing
    admins: KeyRing
    sources: Mapping[str, FleetSource]
    siblings: Siblings | None


def assemble(
    config: ProxyConfig, clock: Clock, upstream: Upstream, background: Supervisor, shared_file: Path | None = None
) -> Assembled:
    """Make everything.

    Args:
        config: the settings.
        clock: everybody's clock.
        upstream: towards the engines.
        background: for what outlives a request.
        shared_file: what this process is known by among its siblings: where it keeps its counts and takes their orders.

    Raises:
        ConfigError: a file that the settings name cannot be used.
    """
    limits = TimeLimits(clock)
    # A leg that waits for an engine found dead waits in vain.
    fleet = Fleet(config.fleet, clock, _engine_tls(config), on_death=limits.expire)
    admission = Admission(config.admission)
    metrics = _metrics(admission, background, fleet)
    services = Services(
        config=config,
        rules=_rules(config),
        clock=clock,
        fleet=fleet,
        policies={
            Role.PREFILL: make_policy(config.routing.prefill),
            Role.DECODE: make_policy(config.routing.decode),
        },
        upstream=upstream,
        admission=admission,
        background=background,
        metrics=metrics,
        shared_metrics=None if shared_file is None else SharedMetrics(shared_file, metrics),
        limits=limits,
        prompt_memory=PromptMemory(),
        traces=_exporter(config.tracing, clock),
    )
    clients, admins = KeyRing(config.keys.client_file, clock), KeyRing(config.keys.admin_file, clock)
    running = RunningRequests()
    orders = Orders(fleet, running)
    siblings = None if shared_file is None else Siblings(shared_file, orders.obey)
    return Assembled(
        services=services,
        app=ProxyApp(services, clients, admins, running, AdminRoutes(orders, siblings, config)),
        clients=clients,
        admins=admins,
        sources=make_sources(config.fleet, fleet),
        siblings=siblings,
    )


def _engine_tls(config: ProxyConfig) -> ssl.SSLContext | None:
    uses_tls = any(url.startswith("https:") for url in (*config.fleet.prefill, *config.fleet.decode))
    has_own_tls = config.engine_tls.ca_file is not None or config.engine_tls.cert_file is not None
    return client_context(config.engine_tls, "proxy.engine_tls") if uses_tls or has_own_tls else None


def _rules(config: ProxyConfig) -> LegRules:
    return LegRules(
        strip_constraint=config.structured_output != "naive",
        constraint_in_prompt=config.constraint_in_prompt,
        our_engines=config.dialect == "pd",
    )


def _exporter(config: TracingConfig, clock: Clock) -> TraceExporter | None:
    if config.otlp_url is None:
        return None
    return TraceExporter(HttpCollector(config.otlp_url), config.service_name, clock)


def make_policy(name: Policy) -> RoutingPolicy:
    """The policy a config names."""
    by_load = LeastLoaded(Random())
    if name == "round_robin":
        return RoundRobin()
    if name == "prefix_affinity":
        return PrefixAffinity(by_load)
    return GrammarWarm(by_load) if name == "grammar_warm" else by_load


def _metrics(admission: Admission, background: Supervisor, fleet: Fleet) -> ProxyMetrics:
    metrics = ProxyMetrics()
    metrics.watch("pd_requests_running", "Requests that hold a slot.", lambda: admission.num_running)
    metrics.watch("pd_proxy_requests_queued", "Requests that wait for a slot.", lambda: admission.num_waiting)
    metrics.watch("pd_proxy_tasks", "Background tasks.", lambda: background.num_tasks)
    for role in Role:
        name, text = f"pd_proxy_{role.value}_engines_routable", f"{role.value} engines that legs may go to."
        # Each process has its own view: the darkest one is told.
        metrics.watch(name, text, lambda role=role: sum(w.is_routable for w in fleet.of(role)), min)  # type: ignore[misc]  # bound per turn
    return metrics

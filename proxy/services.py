"""What every journey is given: the collaborators that live as long as the process.

Owns: the bundle and the choice of a worker by policy. Built in `main.py` only.
"""

from collections.abc import Collection, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from common.clock import Clock, Deadline
from common.errors import UpstreamTimeout
from common.tasks import Supervisor
from common.tracing.exporter import TraceExporter
from common.wire import timing
from proxy.admission import Admission
from proxy.call import Call
from proxy.config import ProxyConfig
from proxy.fleet.membership import Fleet
from proxy.fleet.worker import Role, Worker
from proxy.leg_bodies import LegRules
from proxy.metrics import ProxyMetrics
from proxy.routing.policy import RoutingPolicy
from proxy.routing.prompt_memory import PromptMemory
from proxy.shared_metrics import SharedMetrics
from proxy.time_limits import TimeLimits
from proxy.upstream import Upstream

T = TypeVar("T")

TIMING_HEADER = timing.HEADER.lower()
"""As the client of the engines spells header names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Collaborators of a journey."""

    config: ProxyConfig
    rules: LegRules
    clock: Clock
    fleet: Fleet
    policies: dict[Role, RoutingPolicy]
    upstream: Upstream
    admission: Admission
    background: Supervisor
    metrics: ProxyMetrics
    limits: TimeLimits
    prompt_memory: PromptMemory
    traces: TraceExporter | None = None
    shared_metrics: SharedMetrics | None = None

    def pick(self, role: Role, call: Call, excluded: Collection[Worker] = ()) -> Worker | None:
        """A routable worker of `role` outside `excluded`, by policy; None when there is none."""
        candidates = self.fleet.routable(role, excluded)
        return self.policies[role].pick(candidates, call) if candidates else None

    async def bounded(self, worker: Worker, deadline: Deadline, limit_s: float, leg: Coroutine[Any, Any, T]) -> T:
        """The result of `leg`, unless time runs out or `worker` is found dead first.

        Raises:
            UpstreamTimeout: no result in time.
        """
        try:
            with self.limits.limit(min(limit_s, deadline.remaining_s()), worker):
                return await leg
        except TimeoutError as error:
            raise UpstreamTimeout(f"the {worker.role.value} engine did not answer in time") from error

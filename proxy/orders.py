"""What operators and clients may order at run time, carried out in this process: changes of the fleet, aborts.

Owns: the orders and what each of them does here. Does not know: HTTP, who may give them, other processes.
"""

from typing import Literal

import msgspec
import structlog

from common.errors import IllegalTransition, InvalidRequest, NotFound
from proxy.fleet.breaker import BreakerState
from proxy.fleet.membership import Fleet, Source
from proxy.fleet.worker import Role, Worker, WorkerState
from proxy.running_requests import RunningRequests

_log = structlog.get_logger(__name__)
_WORST_FIRST = (WorkerState.DEAD, WorkerState.STARTING, WorkerState.DRAINING, WorkerState.READY)
_STATES = [state.value for state in _WORST_FIRST]
_CIRCUITS = [state.value for state in (BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.CLOSED)]


class FleetOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="fleet"):
    """What to do with one engine."""

    action: Literal["add", "drain", "undrain", "remove"]
    role: Literal["prefill", "decode"]
    url: str


class AbortOrder(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="abort"):
    """Which request to end: `owner` is the name of the key that it must have come with."""

    request_id: str
    owner: str | None


class Look(msgspec.Struct, frozen=True, tag_field="kind", tag="look"):
    """Tell how the fleet stands; changes nothing."""


Order = FleetOrder | AbortOrder | Look


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """One engine as one process sees it, or as all of them do together."""

    role: str
    url: str
    state: str
    circuit: str
    num_legs: int
    outstanding_bytes: int
    models: tuple[msgspec.Raw, ...]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What came of an order.

    Attributes:
        num_aborted: requests that were ended.
        engines: the fleet afterwards.
    """

    num_aborted: int = 0
    engines: tuple[EngineView, ...] = ()


class Orders:
    """Carries them out.

    Args:
        fleet: what is administered.
        running: the requests under way.
    """

    def __init__(self, fleet: Fleet, running: RunningRequests) -> None:
        self._fleet = fleet
        self._running = running

    def obey(self, order: Order) -> Report:
        """Carry out one.

        Raises:
            InvalidRequest: it makes no sense.
            NotFound: no such engine.
        """
        if isinstance(order, AbortOrder):
            return Report(num_aborted=self._running.abort(order.request_id, order.owner))
        if isinstance(order, FleetOrder):
            self._change(order)
        return Report(engines=tuple(map(_view, self._fleet.all())))

    def _change(self, order: FleetOrder) -> None:
        role = Role(order.role)
        if order.action == "add":
            if not order.url.startswith(("http://", "https://")):
                raise InvalidRequest("an engine's url starts with http:// or https://", param="url")
            self._fleet.add(role, order.url, Source.ADMIN)
        elif order.action == "remove":
            if self._fleet.remove(role, order.url) is None:
                raise NotFound(f"there is no {order.role} engine at {order.url}")
        else:
            self._move(role, order)
        _log.info("fleet.changed", action=order.action, role_of_engine=order.role, url=order.url)

    def _move(self, role: Role, order: FleetOrder) -> None:
        worker = self._fleet.find(role, order.url)
        if worker is None:
            raise NotFound(f"there is no {order.role} engine at {order.url}")
        target = WorkerState.DRAINING if order.action == "drain" else WorkerState.STARTING
        try:
            worker.move_to(target)
        except IllegalTransition as error:
            raise InvalidRequest(f"cannot {order.action} an engine that is {worker.state.value}") from error


def _view(worker: Worker) -> EngineView:
    return EngineView(
        role=worker.role.value,
        url=worker.url,
        state=worker.state.value,
        circuit=worker.breaker.status.value,
        num_legs=worker.num_legs,
        outstanding_bytes=worker.outstanding_bytes,
        models=tuple(map(msgspec.Raw, worker.models)),
    )


def joined(reports: list[Report]) -> Report:
    """What several processes say, as one: loads are added, of health and circuit the worst is told."""
    engines: dict[tuple[str, str], EngineView] = {}
    for view in (view for report in reports for view in report.engines):
        known = engines.get((view.role, view.url))
        engines[view.role, view.url] = view if known is None else _both(known, view)
    return Report(num_aborted=sum(report.num_aborted for report in reports), engines=tuple(engines.values()))


def _both(one: EngineView, other: EngineView) -> EngineView:
    return EngineView(
        role=one.role,
        url=one.url,
        state=min(one.state, other.state, key=_STATES.index),
        circuit=min(one.circuit, other.circuit, key=_CIRCUITS.index),
        num_legs=one.num_legs + other.num_legs,
        outstanding_bytes=one.outstanding_bytes + other.outstanding_bytes,
        models=one.models or other.models,
    )

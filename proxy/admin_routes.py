"""`/admin/fleet` (look, add, drain, put back, remove) and `/abort`.

Owns: their bodies and answers. Does not know: who may call them (the app checks keys), health.
"""

from typing import Literal, TypeVar

import msgspec
import structlog
from aiohttp import web

from common.errors import IllegalTransition, InvalidRequest, NotFound
from proxy.config import ProxyConfig
from proxy.fleet.membership import Fleet, Source
from proxy.fleet.worker import Role, WorkerState
from proxy.incoming import Incoming, json_response, read_body
from proxy.running_requests import RunningRequests

T = TypeVar("T")

_log = structlog.get_logger(__name__)


class FleetOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to do with one engine."""

    action: Literal["add", "drain", "undrain", "remove"]
    role: Literal["prefill", "decode"]
    url: str


class AbortOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which request to end."""

    request_id: str


class AdminRoutes:
    """Their handlers.

    Args:
        fleet: what is administered.
        running: the requests under way.
        config: limits for bodies.
    """

    def __init__(self, fleet: Fleet, running: RunningRequests, config: ProxyConfig) -> None:
        self._fleet = fleet
        self._running = running
        self._config = config

    async def show(self, _: Incoming) -> web.StreamResponse:
        """Every engine, its health and its load."""
        workers = [
            {
                "role": worker.role.value,
                "url": worker.url,
                "state": worker.state.value,
                "circuit": worker.breaker.status.value,
                "num_legs": worker.num_legs,
                "outstanding_bytes": worker.outstanding_bytes,
                "models": [msgspec.Raw(card) for card in worker.models],
            }
            for worker in self._fleet.all()
        ]
        return json_response(msgspec.json.encode({"workers": workers}))

    async def change(self, incoming: Incoming) -> web.StreamResponse:
        """Carry out one order.

        Raises:
            InvalidRequest: the order makes no sense.
            NotFound: no such engine.
        """
        order = await self._read(incoming, FleetOrder)
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
        _log.info("fleet.changed", action=order.action, role_of_engine=order.role, url=order.url, by=incoming.owner)
        return await self.show(incoming)

    async def abort(self, incoming: Incoming) -> web.StreamResponse:
        """End a request of the same key on both legs.

        Raises:
            NotFound: none of that id is under way.
        """
        order = await self._read(incoming, AbortOrder)
        num_aborted = self._running.abort(order.request_id, incoming.owner)
        if num_aborted == 0:
            raise NotFound("no request of this id is under way")
        return json_response(msgspec.json.encode({"aborted": num_aborted}))

    def _move(self, role: Role, order: FleetOrder) -> None:
        worker = self._fleet.find(role, order.url)
        if worker is None:
            raise NotFound(f"there is no {order.role} engine at {order.url}")
        target = WorkerState.DRAINING if order.action == "drain" else WorkerState.STARTING
        try:
            worker.move_to(target)
        except IllegalTransition as error:
            raise InvalidRequest(f"cannot {order.action} an engine that is {worker.state.value}") from error

    async def _read(self, incoming: Incoming, type_: type[T]) -> T:
        body = await read_body(incoming.http, self._config)
        try:
            return msgspec.json.decode(body, type=type_)
        except msgspec.MsgspecError as error:
            raise InvalidRequest(str(error)) from error

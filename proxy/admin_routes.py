"""`/admin/fleet` (look, add, drain, put back, remove) and `/abort`, for all processes of `--workers N`.

Owns: their bodies and answers. Does not know: who may call them (the app checks keys), what an order does.
"""

from typing import Literal, TypeVar

import msgspec
import structlog

from common.errors import InvalidRequest, NotFound
from proxy.config import ProxyConfig
from proxy.http1.exchange import Reply
from proxy.incoming import Incoming, json_response, read_body
from proxy.orders import AbortOrder, EngineView, FleetOrder, Look, Order, Orders, Report, joined
from proxy.siblings import Siblings

T = TypeVar("T")

_log = structlog.get_logger(__name__)


class _FleetBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    action: Literal["add", "drain", "undrain", "remove"]
    role: Literal["prefill", "decode"]
    url: str


class _AbortBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    request_id: str


class AdminRoutes:
    """Their handlers.

    Args:
        orders: carries them out in this process.
        siblings: the other processes, where there are any.
        config: limits for bodies.
    """

    def __init__(self, orders: Orders, siblings: Siblings | None, config: ProxyConfig) -> None:
        self._orders = orders
        self._siblings = siblings
        self._config = config

    async def show(self, _: Incoming) -> Reply:
        """Every engine, its health and its load."""
        return _shown((await self._give(Look())).engines)

    async def change(self, incoming: Incoming) -> Reply:
        """Carry out one order.

        Raises:
            InvalidRequest: the order makes no sense.
            NotFound: no such engine.
        """
        asked = await self._read(incoming, _FleetBody)
        report = await self._give(FleetOrder(action=asked.action, role=asked.role, url=asked.url))
        _log.info("fleet.ordered", action=asked.action, url=asked.url, by=incoming.owner)
        return _shown(report.engines)

    async def abort(self, incoming: Incoming) -> Reply:
        """End a request of the same key on both legs.

        Raises:
            NotFound: none of that id is under way.
        """
        asked = await self._read(incoming, _AbortBody)
        report = await self._give(AbortOrder(request_id=asked.request_id, owner=incoming.owner))
        if report.num_aborted == 0:
            raise NotFound("no request of this id is under way")
        return json_response(msgspec.json.encode({"aborted": report.num_aborted}))

    async def _give(self, order: Order) -> Report:
        """Here first: what is wrong with an order is said before anybody else hears of it."""
        reports = [self._orders.obey(order)]
        if self._siblings is not None:
            reports += await self._siblings.tell(order)
        return joined(reports)

    async def _read(self, incoming: Incoming, type_: type[T]) -> T:
        body = await read_body(incoming.http, self._config)
        try:
            return msgspec.json.decode(body, type=type_)
        except msgspec.MsgspecError as error:
            raise InvalidRequest(str(error)) from error


def _shown(engines: tuple[EngineView, ...]) -> Reply:
    return json_response(msgspec.json.encode({"workers": engines}))

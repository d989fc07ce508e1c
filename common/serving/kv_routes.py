"""`/kv/handshake` and `/kv/release` on P (journey rows 7 and x), through a port.

Owns: the routes. Does not know: what handshakes say.
"""

import msgspec
from aiohttp import web

from common.errors import InvalidRequest, NotFound
from common.ids import LeaseId, RequestId
from common.openai import requests
from common.serving.bodies import read_body
from common.serving.ports import HttpReply, KvControl
from common.serving.surface import Surface


class ReleaseFields(msgspec.Struct, frozen=True, kw_only=True):
    """Which handoff nobody will come for. Both ids are unguessable, so knowing one is the right to give it up."""

    lease_id: LeaseId | None = None
    request_id: RequestId | None = None


class KvRoutes:
    """The routes."""

    def __init__(self, surface: Surface) -> None:
        self._surface = surface

    async def offer(self, _: web.Request) -> web.Response:
        """First phase of a handshake: who P is."""
        return _response(self._control().handshake_offer())

    async def answer(self, http: web.Request) -> web.Response:
        """Second phase: where P's memory is."""
        control = self._control()
        return _response(control.handshake_answer(await read_body(http)))

    async def release(self, http: web.Request) -> web.Response:
        """Give a handoff up; one that is over already is no error."""
        control = self._control()
        fields = requests.read(await read_body(http), ReleaseFields)
        if fields.lease_id is None and fields.request_id is None:
            raise InvalidRequest("`lease_id` or `request_id` is missing", param="lease_id")
        released = False
        if fields.lease_id is not None:
            released = control.release(fields.lease_id)
        elif fields.request_id is not None:
            control.cancel_request(fields.request_id)
            released = True
        return web.json_response({"released": released})

    def _control(self) -> KvControl:
        control = self._surface.require().kv_control
        if control is None:
            raise NotFound("this engine hands no KV over")
        return control


def _response(reply: HttpReply) -> web.Response:
    return web.Response(status=reply.status, body=reply.body, content_type="application/json")

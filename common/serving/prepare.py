"""`/prepare`: compile a constraint while its prompt is being prefilled elsewhere (journey row 3a).

Owns: the route and the key that names a grammar to routers. Does not know: who holds compiled grammars.
"""

import asyncio
import hashlib

import msgspec
from aiohttp import web

from common.engine.structured_output.grammar import CompileState, GrammarTicket
from common.errors import ConstraintRejected, InvalidRequest
from common.openai import requests
from common.openai.constraint import parse_constraint
from common.openai.responses import Prepared
from common.serving.bodies import read_body
from common.serving.surface import Surface
from common.wire.constraint import Constraint


class PrepareRoute:
    """The route."""

    def __init__(self, surface: Surface) -> None:
        self._surface = surface

    async def prepare(self, http: web.Request) -> web.Response:
        """200 when the grammar is ready; 400 with the reason when it never will be.

        Raises:
            InvalidRequest: no constraint in the body, or one that cannot be compiled.
        """
        parts = self._surface.require()
        body = await read_body(http)
        parts.model.require(requests.read(body, requests.PrepareFields).model)
        constraint = parse_constraint(requests.read_mapping(body), parts.model.tools)
        if constraint is None:
            raise InvalidRequest("the body holds no constraint to prepare", param="response_format")
        parts.grammars.check(constraint)
        ticket = parts.grammars.compile(constraint)
        await settled(ticket)
        if ticket.state is CompileState.FAILED:
            raise ticket.error or ConstraintRejected("the constraint cannot be compiled", param=constraint.field)
        answer = Prepared(
            backend=ticket.backend or "",
            compile_ms=round((ticket.compile_s or 0.0) * 1000, 3),
            key=grammar_key(constraint),
        )
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")


async def settled(ticket: GrammarTicket) -> None:
    """Sleep until `ticket` is READY or FAILED; its time limit is the compiler's."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def wake() -> None:
        """From the compiler's thread."""
        # The loop may have closed since: nobody waits any more then.
        if not loop.is_closed():
            loop.call_soon_threadsafe(done.set)

    ticket.on_settled(wake)
    await done.wait()


def grammar_key(constraint: Constraint) -> str:
    """16 hex digits, equal for constraints that compile to the same language."""
    return hashlib.sha256(msgspec.msgpack.encode(constraint.key)).hexdigest()[:16]

"""`/v1/chat/completions` (journey row 5 → 9).

Owns: the order of intent, job and answer for this endpoint. Does not know: how any of them works.
"""

from aiohttp import web

from common.serving.bodies import read_body
from common.serving.chat_answer import ChatStream, ChatWhole
from common.serving.surface import Surface
from common.serving.tracing import attach


class ChatRoute:
    """The route."""

    def __init__(self, surface: Surface) -> None:
        self._surface = surface

    async def complete(self, http: web.Request) -> web.StreamResponse:
        """Answer the conversation of the body."""
        parts = self._surface.require()
        timeline = parts.intake.begin()
        attach(http, timeline)
        body = await read_body(http)
        intent = parts.kv.read(body)
        with parts.kv.telling_on_refusal(intent):
            chat = await parts.intake.chat(body, intent, timeline)
        if chat.job.options.stream:
            return await parts.responder.stream(http, chat.job, ChatStream(chat, parts.model))
        return await parts.responder.whole(http, chat.job, ChatWhole(chat, parts.model))

"""`/v1/completions` (journey row 5 → 9).

Owns: the order of intent, job and answer for this endpoint. Does not know: how any of them works.
"""

from aiohttp import web

from common.serving.bodies import read_body
from common.serving.completion_answer import CompletionStream, CompletionWhole
from common.serving.surface import Surface
from common.serving.tracing import attach


class CompletionRoute:
    """The route."""

    def __init__(self, surface: Surface) -> None:
        self._surface = surface

    async def complete(self, http: web.Request) -> web.StreamResponse:
        """Continue every prompt of the body."""
        parts = self._surface.require()
        timeline = parts.intake.begin()
        attach(http, timeline)
        body = await read_body(http)
        intent = parts.kv.read(body)
        with parts.kv.telling_on_refusal(intent):
            completion = await parts.intake.completion(body, intent, timeline)
        job, tokenizer = completion.job, parts.model.tokenizer
        if job.options.stream:
            return await parts.responder.stream(http, job, CompletionStream(completion, tokenizer))
        return await parts.responder.whole(http, job, CompletionWhole(completion, tokenizer))

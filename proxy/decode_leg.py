"""The decode leg: D takes over with P's KV and its answer begins (journey rows 5 to 8, seen from outside).

Owns: one call to one D up to the first byte of its answer; for answers that are no stream, up to the last.
Does not know: retries, the client.
"""

from collections.abc import Mapping

import msgspec

from common.openai import sse
from common.tracing.context import ANSWER_HEADER as TRACED
from common.wire import timing
from proxy.call import Call
from proxy.fleet.worker import Worker
from proxy.services import TIMING_HEADER, Services
from proxy.upstream import OpenAnswer

_TRUE = b"true"


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """An answer of D that can be passed on.

    Attributes:
        answer: where the rest of a stream comes from; at its end for anything else.
        first: the first bytes of a stream, or the whole body.
        is_stream: whether it is an event stream.
        stages_s: what D reports about its part of the TTFT.
        is_traced: whether D makes spans of its own.
    """

    answer: OpenAnswer
    first: bytes
    is_stream: bool
    stages_s: Mapping[str, float]
    is_traced: bool = False


async def decode(call: Call, body: bytes, worker: Worker, services: Services, opened: list[OpenAnswer]) -> Started:
    """Run one decode leg until the client can be answered; the caller closes what is in `opened`.

    Raises:
        EngineRefused: D answered with an error status.
        UpstreamError: no answer, or it broke off before anything could be passed on.
    """
    # Nothing comes before the whole answer when it is no stream, so only the request's deadline bounds it.
    asks_stream = bytes(call.fields.get("stream", b"")) == _TRUE
    limit_s = services.config.timeouts.first_token_s if asks_stream else services.config.timeouts.request_s
    return await services.bounded(worker, call.deadline, limit_s, _begin(call, body, worker, services, opened))


async def _begin(call: Call, body: bytes, worker: Worker, services: Services, opened: list[OpenAnswer]) -> Started:
    answer = await services.upstream.send_ok(worker, call.path, body, call.headers_of("decode"))
    opened.append(answer)
    is_stream = answer.headers.get("content-type", "").startswith(sse.CONTENT_TYPE)
    first = await (answer.read_some() if is_stream else answer.read_all())
    stages_s = timing.decode(answer.headers.get(TIMING_HEADER))
    is_traced = TRACED in answer.headers
    return Started(answer=answer, first=first, is_stream=is_stream, stages_s=stages_s, is_traced=is_traced)

"""Preparing an engine without `/prepare`: let it begin to compile, at the price of no forward (journey row 3a, vLLM).

Owns: the warm-up request and when it has done its work. Does not know: which answers end the client's request.

A request for one token under the same constraint, streamed. vLLM sends the head of a stream just before it checks the
request and hands it to the engine, which submits the compilation as the request comes in and goes on with it whether or
not anybody still waits (vLLM 0.32, `AsyncLLM.add_request`, `StructuredOutputManager.grammar_init`). So the connection
is dropped a moment after the head: a request that stays makes the engine look for its grammar without rest, and then
costs it a forward that the decode leg would have to wait for.
"""

import asyncio

import msgspec

from common.errors import UpstreamBroken
from common.openai import sse
from proxy.call import Call
from proxy.fleet.worker import Worker
from proxy.incoming import REQUEST_ID
from proxy.leg_bodies import warm_up_leg
from proxy.services import Services
from proxy.upstream import Answer, EngineRefused, OpenAnswer


class _Error(msgspec.Struct):
    code: int


class _Refusal(msgspec.Struct):
    error: _Error


async def warm_up(call: Call, worker: Worker, services: Services, prepared: bytes) -> str:
    """Let `worker` compile the constraint of `call`; how it ended: known, small, begun or ok.

    Args:
        call: the client's request.
        worker: the D that will decode it.
        services: collaborators.
        prepared: what the grammar depends on, as `prepare_body` writes it.

    Raises:
        EngineRefused: D refuses the request, with an error status or with an error in its stream.
        UpstreamError: D did not answer.
    """
    key = hash(prepared)
    if key in worker.warmed:
        return "known"
    if len(prepared) < services.config.warm_up_min_bytes:
        return "small"
    timeouts = services.config.timeouts
    result = await services.bounded(worker, call.deadline, timeouts.first_token_s, _begin(call, worker, services))
    worker.warmed.add(key)
    return result


async def _begin(call: Call, worker: Worker, services: Services) -> str:
    path, body = warm_up_leg(call.fields)
    # A vLLM takes the header for its own request id; the decode leg comes with the same one.
    headers = {name: value for name, value in call.headers.items() if name != REQUEST_ID}
    answer = await services.upstream.send_ok(worker, path, body, headers)
    try:
        async with asyncio.timeout(services.config.timeouts.warm_up_s):
            _raise_if_error(worker, await _first_event(answer))
        return "ok"
    except TimeoutError:
        return "begun"
    finally:
        answer.close()


async def _first_event(answer: OpenAnswer) -> bytes:
    """Payload of the first event of a stream; the whole answer if it is none.

    Raises:
        UpstreamBroken: the answer ended before.
    """
    if not answer.headers.get("content-type", "").startswith(sse.CONTENT_TYPE):
        return await answer.read_all()
    parser = sse.SseParser()
    while piece := await answer.read_some():
        if payloads := parser.push(piece):
            return payloads[0]
    raise UpstreamBroken("the decode engine broke off its answer")


def _raise_if_error(worker: Worker, event: bytes) -> None:
    """A streamed request is checked after the head is out, and refused in the stream."""
    try:
        status = msgspec.json.decode(event, type=_Refusal).error.code
    except msgspec.DecodeError:  # a token
        return
    if 400 <= status <= 599:
        raise EngineRefused(worker, Answer(status, {"content-type": "application/json"}, event))

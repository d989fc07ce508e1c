"""The prepare leg: D compiles the constraint while P computes the prompt (journey row 3a).

Owns: one call to one D, and which of its answers end the request. Does not know: grammars, P.
"""

from common.errors import UpstreamError, UpstreamTimeout
from proxy.call import Call
from proxy.fleet.worker import Worker
from proxy.incoming import REQUEST_ID
from proxy.leg_bodies import prepare_body, warm_up_leg
from proxy.services import Services
from proxy.upstream import EngineRefused

PREPARE_PATH = "/prepare"
# The request is at fault and D would say so again later. Anything else (404: no such path) only costs the head start.
_FINAL_STATUSES = (400, 401, 403, 413, 422)


async def prepare(call: Call, worker: Worker, services: Services) -> None:
    """Have D get ready for the constraint; returns when it is, or when preparing turns out to be impossible.

    Raises:
        EngineRefused: D refuses this constraint; its answer holds the reason.
    """
    body = prepare_body(call.fields)
    if services.config.dialect == "vllm":
        result = await _warm_up(call, worker, services, body)
    else:
        leg = services.upstream.ask_ok(worker, PREPARE_PATH, body, call.headers)
        limit_s = services.config.timeouts.first_token_s
        try:
            await services.bounded(worker, call.deadline, limit_s, leg)
            result = "ok"
        except UpstreamError as error:
            result = _unless_final(error, services)
    services.metrics.legs.inc("prepare", result)


async def _warm_up(call: Call, worker: Worker, services: Services, prepared: bytes) -> str:
    """The same for an engine without `/prepare`: ask for one token under the same constraint. How it ended.

    A warm-up is there to begin the compilation, which goes on without it; its token would only cost D a step, so it is
    given up after a moment.
    """
    key = hash(prepared)
    if key in worker.warmed:
        return "known"
    if len(prepared) < services.config.warm_up_min_bytes:
        return "small"
    path, body = warm_up_leg(call.fields)
    # A vLLM takes the header for its own request id; the decode leg comes with the same one.
    headers = {name: value for name, value in call.headers.items() if name != REQUEST_ID}
    leg = services.upstream.ask_ok(worker, path, body, headers)
    try:
        await services.bounded(worker, call.deadline, services.config.timeouts.warm_up_s, leg)
        result = "ok"
    except UpstreamTimeout:
        result = "begun"
    except UpstreamError as error:
        return _unless_final(error, services)
    worker.warmed.add(key)
    return result


def _unless_final(error: UpstreamError, services: Services) -> str:
    """How preparing failed; raises `error` where it is D's last word on the constraint."""
    if not isinstance(error, EngineRefused):
        return "failed"
    if error.answer.status in _FINAL_STATUSES:
        services.metrics.legs.inc("prepare", "refused")
        raise error
    return "refused"

"""The prepare leg: D compiles the constraint while P computes the prompt (journey row 3a).

Owns: one call to one D, and which of its answers end the request. Does not know: grammars, P.
"""

from common.errors import UpstreamError
from proxy.call import Call
from proxy.fleet.worker import Worker
from proxy.leg_bodies import prepare_body
from proxy.services import Services
from proxy.upstream import EngineRefused
from proxy.warm_up import warm_up

PREPARE_PATH = "/prepare"
# The request is at fault and D would say so again later. Anything else (404: no such path) only costs the head start.
_FINAL_STATUSES = (400, 401, 403, 413, 422)


async def prepare(call: Call, worker: Worker, services: Services) -> None:
    """Have D get ready for the constraint; returns when it is, or when preparing turns out to be impossible.

    Raises:
        EngineRefused: D refuses this constraint; its answer holds the reason.
    """
    body = prepare_body(call.fields)
    try:
        if services.config.dialect == "vllm":
            result = await warm_up(call, worker, services, body)
        else:
            leg = services.upstream.ask_ok(worker, PREPARE_PATH, body, call.headers)
            await services.bounded(worker, call.deadline, services.config.timeouts.first_token_s, leg)
            result = "ok"
    except UpstreamError as error:
        result = _unless_final(error, services)
    services.metrics.legs.inc("prepare", result)


def _unless_final(error: UpstreamError, services: Services) -> str:
    """How preparing failed; raises `error` where it is D's last word on the constraint."""
    if not isinstance(error, EngineRefused):
        return "failed"
    if error.answer.status in _FINAL_STATUSES:
        services.metrics.legs.inc("prepare", "refused")
        raise error
    return "refused"

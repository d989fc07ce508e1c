"""The prepare leg: D compiles the constraint while P computes the prompt (journey row 3a).

Owns: one call to one D, and which of its answers end the request. Does not know: grammars, P.
"""

from common.errors import UpstreamError
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
    path, body, headers = PREPARE_PATH, prepare_body(call.fields), call.headers
    key = hash(body)
    is_warm_up = services.config.dialect == "vllm"
    if is_warm_up:
        if key in worker.warmed:
            services.metrics.legs.inc("prepare", "known")
            return
        if len(body) < services.config.warm_up_min_bytes:
            services.metrics.legs.inc("prepare", "small")
            return
        path, body = warm_up_leg(call.fields)
        # A vLLM takes the header for its own request id; the decode leg comes with the same one.
        headers = {name: value for name, value in headers.items() if name != REQUEST_ID}
    leg = services.upstream.ask_ok(worker, path, body, headers)
    try:
        await services.bounded(worker, call.deadline, services.config.timeouts.first_token_s, leg)
    except EngineRefused as refused:
        services.metrics.legs.inc("prepare", "refused")
        if refused.answer.status in _FINAL_STATUSES:
            raise
    except UpstreamError:
        services.metrics.legs.inc("prepare", "failed")
    else:
        services.metrics.legs.inc("prepare", "ok")
        if is_warm_up:
            worker.warmed.add(key)

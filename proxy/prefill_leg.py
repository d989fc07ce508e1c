"""The prefill leg: P computes the prompt, keeps its KV and says where it lies (journey rows 3b and 4).

Owns: one call to one P, what its answer must hold, and telling P to let go again.
Does not know: retries, D, what `kv_transfer_params` mean (they travel verbatim).
"""

from collections.abc import Mapping

import msgspec

from common.clock import Deadline
from common.errors import UpstreamBroken, UpstreamError
from common.tracing.context import ANSWER_HEADER as TRACED
from common.wire import timing
from proxy.call import NULL, Call
from proxy.fleet.worker import Worker
from proxy.leg_bodies import prefill_body
from proxy.services import TIMING_HEADER, Services

RELEASE_PATH = "/kv/release"


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(NULL)


class _Held(msgspec.Struct):
    remote_request_id: str | None = None
    lease_id: str | None = None


_answer = msgspec.json.Decoder(_PrefillAnswer)


class Prefilled(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that P has computed.

    Attributes:
        worker: the P that holds the KV.
        kv_params: its `kv_transfer_params` as it spelled them; None when it hands nothing over.
        stages_s: what P reports about its part of the TTFT.
        body: P's whole answer.
        is_traced: whether P makes spans of its own.
    """

    worker: Worker
    kv_params: bytes | None
    stages_s: Mapping[str, float]
    body: bytes
    is_traced: bool = False


async def prefill(call: Call, worker: Worker, services: Services) -> Prefilled:
    """Run one prefill leg.

    Raises:
        EngineRefused: P answered with an error status.
        UpstreamError: no answer, or one that makes no sense.
    """
    body = prefill_body(call.fields, services.rules)
    leg = services.upstream.ask_ok(worker, call.path, body, call.headers_of("prefill"))
    worker.load(call.num_body_bytes)
    try:
        answer = await services.bounded(worker, call.deadline, services.config.timeouts.prefill_s, leg)
    finally:
        worker.unload(call.num_body_bytes)
    try:
        kv_params = bytes(_answer.decode(answer.body).kv_transfer_params)
    except msgspec.MsgspecError as error:
        raise UpstreamBroken("the prefill engine's answer is no JSON object") from error
    stages_s = timing.decode(answer.headers.get(TIMING_HEADER))
    return Prefilled(
        worker=worker,
        kv_params=None if kv_params == NULL else kv_params,
        stages_s=stages_s,
        body=answer.body,
        is_traced=TRACED in answer.headers,
    )


async def release(prefilled: Prefilled, headers: Mapping[str, str], services: Services) -> None:
    """Tell P that nobody will come for the KV; if that fails, its lease runs out by itself."""
    result = "failed"
    try:
        held = msgspec.json.decode(prefilled.kv_params or b"{}", type=_Held)
        body = msgspec.json.encode({"request_id": held.remote_request_id, "lease_id": held.lease_id})
        limit_s = services.config.timeouts.release_s
        leg = services.upstream.ask_ok(prefilled.worker, RELEASE_PATH, body, headers)
        await services.bounded(prefilled.worker, Deadline.after(services.clock, limit_s), limit_s, leg)
        result = "told"
    except (UpstreamError, msgspec.MsgspecError):
        pass
    finally:
        services.metrics.releases.inc(result)

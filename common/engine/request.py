"""What an engine is asked: `GenerateRequest`, the frozen value between threads (STYLE rule 6).

Owns: the value. The scheduler's mutable counterpart is `common.engine.scheduling.sequence.Request`.
"""

from dataclasses import dataclass

from common.engine.sampling.params import SamplingParams
from common.engine.structured_output.thinking import Thinking
from common.ids import RequestId
from common.telemetry.timeline import Timeline
from common.wire.constraint import Constraint
from common.wire.kv_params import KvReference


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One prompt to continue. Everything in it has been validated.

    Attributes:
        request_id: unique in this engine.
        prompt_token_ids: at least one.
        sampling: normalised parameters; `n` > 1 forks after the prompt (one prefill, one pull).
        constraint: what the output must match, or None.
        thinking: what may stand before the part that must match it.
        reference: KV of the prompt held by another engine (D's way in), verified; None computes it here.
        hand_off: P's way: finish after the first token and leave the KV under a lease.
        timeline: carries RECEIVED already; the engine marks the rest.
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    timeline: Timeline
    constraint: Constraint | None = None
    reference: KvReference | None = None
    hand_off: bool = False
    thinking: Thinking = Thinking.NONE

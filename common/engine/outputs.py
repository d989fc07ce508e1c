"""What an engine answers: token deltas, per choice, in step order.

Owns: the frozen values from the step loop to the API side. A step makes a `TokenDelta` per request, so it is the kind
of value that is made fastest. Does not know text: `common.engine.detokenizer`.
"""

from dataclasses import dataclass

import msgspec

from common.engine.request_state import FinishReason
from common.errors import PDError
from common.ids import RequestId
from common.wire.kv_params import KvReference


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """One token's log probability and its rank (1 = most likely)."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionLogprobs:
    """Of one output position: the chosen token first, then the alternatives asked for, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one choice of one request, or its end.

    Attributes:
        token_ids: appended since the last delta; a stop token that ended the output is included.
        logprobs: one per token when asked for, else empty.
        finish: set exactly once per choice, in its last delta.
        stop_reason: the stop token id that ended it (None for EOS); stop strings are found on the API side.
        error: why, when finish is ERROR.
        handoff: where the KV lies, when finish is HANDED_OFF.
        prompt_logprobs: in the first delta when asked for; position 0 is None.
        num_cached_tokens: prompt tokens not computed here (prefix cache or pull); in the first delta.
        num_pulled_tokens: of those, how many were pulled from P.
    """

    request_id: RequestId
    index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish: FinishReason | None = None
    stop_reason: int | None = None
    error: PDError | None = None
    handoff: KvReference | None = None
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    num_cached_tokens: int = 0
    num_pulled_tokens: int = 0

"""When an output ends on its token ids: grammar end, stop tokens, repetition, length.

Journey row 8. Owns: the order of precedence. Stop strings need text and are found by `common.engine.text_output`.
Does not know: sampling; that stop tokens are masked before `min_tokens` is the sampler's work.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.engine.request_state import FinishReason
from common.engine.sampling.params import RepetitionDetection
from common.engine.scheduling.sequence import Request


@dataclass(frozen=True, slots=True)
class Ending:
    """How an output ended; `stop_reason` is the stop token id (None for EOS and everything else)."""

    reason: FinishReason
    stop_reason: int | None = None


def check_stop(request: Request, eos_token_ids: frozenset[int], max_model_len_tokens: int) -> Ending | None:
    """Whether the last accepted token ended `request`; a stop wins over the length when both fall together.

    A grammar that has ended stops the output even before `min_tokens`: nothing more could be added to it.
    """
    params, token_ids = request.sampling, request.token_ids
    last = token_ids[-1]
    if (
        last not in request.stop_ids
        and not request.ends_otherwise
        and len(token_ids) < min(request.longest_tokens, max_model_len_tokens)
        and (request.matcher is None or not request.matcher.is_terminated())
    ):
        return None  # nearly always
    if request.hand_off:
        return Ending(FinishReason.HANDED_OFF)
    if request.matcher is not None and request.matcher.is_terminated():
        return Ending(FinishReason.STOP, last if last in params.stop_token_ids and last not in eos_token_ids else None)
    if not params.ignore_stops and request.num_output_tokens >= params.min_tokens:
        if last in eos_token_ids and not params.ignore_eos:
            return Ending(FinishReason.STOP)
        if last in params.stop_token_ids:
            return Ending(FinishReason.STOP, last)
        if params.repetition_detection is not None and repeats_itself(request, params.repetition_detection):
            return Ending(FinishReason.REPETITION)
    if request.num_output_tokens >= params.max_tokens or request.num_tokens >= max_model_len_tokens:
        return Ending(FinishReason.LENGTH)
    return None


def repeats_itself(request: Request, rule: RepetitionDetection) -> bool:
    """Whether the output ends in `min_count` equal patterns of one of the rule's sizes."""
    tokens = request.token_ids
    for size in range(rule.min_pattern_size, rule.max_pattern_size + 1):
        span = size * rule.min_count
        if span > request.num_output_tokens:
            return False
        if _is_periodic(tokens[-span:], size):
            return True
    return False


def _is_periodic(tokens: Sequence[int], period: int) -> bool:
    return tokens[period:] == tokens[:-period]

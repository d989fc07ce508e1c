"""Log probabilities (or logits) of chosen tokens and their alternatives, with ranks.

Owns: the numbers of `logprobs`, `logprob_token_ids` and `prompt_logprobs`. A masked token's -inf is reported as
`LOGPROB_FLOOR`, which JSON can carry. Does not know when they are taken: `common.engine.sampling.sampler`.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from common.engine.outputs import PositionLogprobs, TokenLogprob
from common.engine.sampling.row_parameters import LogprobRequest
from common.engine.sampling.top_values import highest_with_places, rows_per_chunk

LOGPROB_FLOOR = -9999.0
"""Stands for -inf. Source: vLLM 0.32 reports the same number over HTTP."""


def position_logprobs(
    scores: torch.Tensor, token_ids: torch.Tensor, requests: Sequence[LogprobRequest], *, normalise: bool
) -> list[PositionLogprobs]:
    """Report each row's chosen token and alternatives.

    Args:
        scores: logits float32 [n, vocab_size]; not changed.
        token_ids: chosen tokens int64 [n].
        requests: what each row wants, length n.
        normalise: report log softmax of `scores`; else `scores` themselves.
    """
    shift = _log_normaliser(scores) if normalise else torch.zeros(scores.shape[0], device=scores.device)
    chosen = scores.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    count = max((request.count for request in requests if request.token_ids is None), default=0)
    top_values, top_ids = highest_with_places(scores, min(count, scores.shape[1]))
    higher = _count_above(scores, chosen, top_values)
    columns = zip(
        token_ids.tolist(),
        (chosen - shift).tolist(),
        higher.tolist(),
        top_ids.tolist(),
        (top_values - shift.unsqueeze(1)).tolist(),
        strict=True,
    )
    reported = []
    for row, (token, logprob, above, ids, values) in enumerate(columns):
        request = requests[row]
        if request.token_ids is None:
            top = _ranked(ids[: request.count], values[: request.count])
        else:
            top = _listed(scores[row], float(shift[row]), request.token_ids)
        reported.append(
            PositionLogprobs(chosen=TokenLogprob(token_id=token, logprob=_finite(logprob), rank=above + 1), top=top)
        )
    return reported


def prompt_logprobs(logits: torch.Tensor, next_token_ids: Sequence[int], count: int) -> list[PositionLogprobs]:
    """Log probabilities of prompt tokens, each under the logits of the position before it.

    Args:
        logits: float32 [n, vocab_size] of n consecutive prompt positions; not changed.
        next_token_ids: the prompt token after each of them, length n.
        count: alternatives per position; -1 is the whole vocabulary.
    """
    request = LogprobRequest(count=logits.shape[1] if count < 0 else count, token_ids=None)
    tokens = torch.tensor(next_token_ids, dtype=torch.int64, device=logits.device)
    return position_logprobs(logits, tokens, [request] * len(next_token_ids), normalise=True)


def _log_normaliser(scores: torch.Tensor) -> torch.Tensor:
    """Log of the sum of exponentials of each row float32 [n, vocab_size], float32 [n]."""
    size = rows_per_chunk(scores.shape[1]) if scores.device.type == "cpu" else scores.shape[0]
    memory = torch.empty(min(size, scores.shape[0]), scores.shape[1], device=scores.device)
    parts = []
    for start in range(0, scores.shape[0], size):
        rows = scores[start : start + size]
        highest = rows.amax(dim=1, keepdim=True)
        weights = torch.sub(rows, highest, out=memory[: rows.shape[0]]).exp_()
        parts.append(weights.sum(dim=1).log_() + highest.squeeze(1))
    return torch.cat(parts)


def _count_above(scores: torch.Tensor, values: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """How many scores float32 [n, vocab_size] of each row are above its value float32 [n]; int64 [n].

    A value not below the lowest of `top` float32 [n, count] is counted there; only the others need all scores.
    """
    if not top.shape[1]:
        return _counted(scores, values)
    above = (top > values.unsqueeze(1)).sum(dim=1)
    deep = torch.nonzero(values < top[:, -1]).squeeze(1)
    if deep.numel():
        above[deep] = _counted(scores[deep], values[deep])
    return above


def _counted(scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    above = scores > values.unsqueeze(1)
    if above.device.type == "cpu":  # numpy counts set bytes many times faster than torch adds them up
        return torch.from_numpy(np.count_nonzero(above.numpy(), axis=1))
    return above.sum(dim=1)


def _ranked(ids: list[int], values: list[float]) -> tuple[TokenLogprob, ...]:
    """Descending alternatives; equal values share a rank."""
    ranked: list[TokenLogprob] = []
    rank = 1
    for place, (token, value) in enumerate(zip(ids, values, strict=True)):
        if place and value < values[place - 1]:
            rank = place + 1
        ranked.append(TokenLogprob(token_id=token, logprob=_finite(value), rank=rank))
    return tuple(ranked)


def _listed(scores: torch.Tensor, shift: float, token_ids: tuple[int, ...]) -> tuple[TokenLogprob, ...]:
    """The asked-for tokens of one row float32 [vocab_size], best first."""
    values = scores[torch.tensor(token_ids, device=scores.device)]
    above = (scores > values.unsqueeze(1)).sum(dim=1).tolist()
    entries = [
        TokenLogprob(token_id=token, logprob=_finite(value - shift), rank=higher + 1)
        for token, value, higher in zip(token_ids, values.tolist(), above, strict=True)
    ]
    return tuple(sorted(entries, key=lambda entry: entry.rank))


def _finite(value: float) -> float:
    return value if math.isfinite(value) else LOGPROB_FLOOR

"""Log probabilities (or logits) of chosen tokens and their alternatives, with ranks.

Owns: the numbers of `logprobs`, `logprob_token_ids` and `prompt_logprobs`, counted by the kernels where there are some.
A masked token's -inf is reported as `LOGPROB_FLOOR`, which JSON can carry. Does not know when they are taken:
`common.engine.sampling.sampler`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.engine.outputs import PositionLogprobs, TokenLogprob
from common.engine.sampling.cpu_kernels.library import SamplingKernels
from common.engine.sampling.row_parameters import LogprobRequest
from common.engine.sampling.top_values import highest_with_places, rows_per_chunk

LOGPROB_FLOOR = -9999.0
"""Stands for -inf. Source: vLLM 0.32 reports the same number over HTTP."""


def position_logprobs(
    scores: torch.Tensor,
    token_ids: torch.Tensor,
    requests: Sequence[LogprobRequest],
    *,
    normalise: bool,
    kernels: SamplingKernels | None,
) -> list[PositionLogprobs]:
    """Report each row's chosen token and alternatives.

    Args:
        scores: logits float32 [n, vocab_size]; not changed.
        token_ids: chosen tokens int64 [n].
        requests: what each row wants, length n.
        normalise: report log softmax of `scores`; else `scores` themselves.
        kernels: for scores on CPU; None: torch.
    """
    scores = scores.contiguous()
    shift = torch.zeros(scores.shape[0], device=scores.device)
    if normalise:
        shift = _log_normaliser(scores) if kernels is None else kernels.log_normaliser(scores)
    chosen = scores.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    count = max((request.count for request in requests if request.token_ids is None), default=0)
    top_values, top_ids = highest_with_places(scores, min(count, scores.shape[1]))
    listed = _listed(scores, shift, chosen, requests, kernels)
    higher = _count_above(scores, chosen, top_values, listed, kernels)
    columns = zip(
        token_ids.tolist(),
        (chosen - shift).tolist(),
        higher,
        top_ids.tolist(),
        (top_values - shift.unsqueeze(1)).tolist(),
        strict=True,
    )
    reported = []
    for row, (token, logprob, above, ids, values) in enumerate(columns):
        request = requests[row]
        top = listed[row].entries if row in listed else _ranked(ids[: request.count], values[: request.count])
        reported.append(
            PositionLogprobs(chosen=TokenLogprob(token_id=token, logprob=_finite(logprob), rank=above + 1), top=top)
        )
    return reported


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


def _count_above(
    scores: torch.Tensor,
    values: torch.Tensor,
    top: torch.Tensor,
    listed: "dict[int, _Listed]",
    kernels: SamplingKernels | None,
) -> list[int]:
    """How many scores float32 [n, vocab_size] of each row are above its value float32 [n].

    A value not below the lowest of `top` float32 [n, count] is counted there, `listed` rows are counted already; only
    the others need all scores.
    """
    if len(listed) == scores.shape[0]:
        return [listed[row].above_chosen for row in range(scores.shape[0])]
    values = values.unsqueeze(1)
    above = (top > values).sum(dim=1)
    is_deep = values.squeeze(1) < top[:, -1] if top.shape[1] else torch.ones_like(above, dtype=torch.bool)
    is_deep[list(listed)] = False
    deep = torch.nonzero(is_deep).squeeze(1)
    if deep.numel() == scores.shape[0]:
        above = _count(scores, values, kernels).squeeze(1)
    elif deep.numel():
        above[deep] = _count(scores[deep], values[deep], kernels).squeeze(1)
    counts: list[int] = above.tolist()
    for row, of_row in listed.items():
        counts[row] = of_row.above_chosen
    return counts


def _count(scores: torch.Tensor, values: torch.Tensor, kernels: SamplingKernels | None) -> torch.Tensor:
    """How many scores float32 [n, vocab_size] of each row are above each of its values float32 [n, m]; int64 [n, m]."""
    if kernels is not None:
        return kernels.count_above(scores, values)
    return torch.stack([(scores > column.unsqueeze(1)).sum(dim=1) for column in values.unbind(1)], dim=1)


def _ranked(ids: list[int], values: list[float]) -> tuple[TokenLogprob, ...]:
    """Descending alternatives; equal values share a rank."""
    ranked: list[TokenLogprob] = []
    rank = 1
    for place, (token, value) in enumerate(zip(ids, values, strict=True)):
        if place and value < values[place - 1]:
            rank = place + 1
        ranked.append(TokenLogprob(token_id=token, logprob=_finite(value), rank=rank))
    return tuple(ranked)


@dataclass(frozen=True, slots=True)
class _Listed:
    """A row that names tokens: those, best first, and how many scores are above the chosen token's."""

    entries: tuple[TokenLogprob, ...]
    above_chosen: int


def _listed(
    scores: torch.Tensor,
    shift: torch.Tensor,
    chosen: torch.Tensor,
    requests: Sequence[LogprobRequest],
    kernels: SamplingKernels | None,
) -> dict[int, _Listed]:
    """The rows that name tokens. Chosen and named ones are counted together: one pass over the scores."""
    asked = {row: request.token_ids for row, request in enumerate(requests) if request.token_ids is not None}
    if not asked:
        return {}
    longest = max(map(len, asked.values()))
    padded = [[*ids, *ids[:1] * (longest - len(ids))] for ids in asked.values()]
    ids = torch.tensor(padded, dtype=torch.int64, device=scores.device)
    rows = slice(None) if len(asked) == len(requests) else torch.tensor(list(asked), device=scores.device)
    values = scores[rows].gather(1, ids)
    counts = _count(scores[rows], torch.cat((chosen[rows].unsqueeze(1), values), dim=1), kernels).tolist()
    reported = (values - shift[rows].unsqueeze(1)).tolist()
    return {
        row: _Listed(
            tuple(
                sorted(
                    (
                        TokenLogprob(token_id=token, logprob=_finite(value), rank=higher + 1)
                        for token, value, higher in zip(tokens, row_values, above, strict=False)  # the rest is padding
                    ),
                    key=_rank,
                )
            ),
            above_chosen,
        )
        for (row, tokens), row_values, (above_chosen, *above) in zip(asked.items(), reported, counts, strict=True)
    }


def _rank(entry: TokenLogprob) -> int:
    return entry.rank


def _finite(value: float) -> float:
    return value if math.isfinite(value) else LOGPROB_FLOOR

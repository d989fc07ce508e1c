"""Log probabilities of prompt tokens, from the logits of the positions before them.

Journey row 3b (P computes them, the proxy merges). Owns: the numbers of one chunk. Does not know: requests.
"""

from collections.abc import Sequence

import torch

from common.engine.outputs import PositionLogprobs, TokenLogprob


def prompt_logprobs(
    logits: torch.Tensor, targets: Sequence[int], num_top: int, *, as_logits: bool
) -> list[PositionLogprobs]:
    """One entry per row: the target token's value and rank, and the best alternatives.

    Args:
        logits: float32 `[len(targets), vocab_size]`; not changed.
        targets: the prompt token that followed each row.
        num_top: alternatives per position; -1 is the whole vocabulary.
        as_logits: report raw logits instead of log probabilities (`logprobs_mode` *_logits).
    """
    values = logits if as_logits else torch.log_softmax(logits, dim=-1)
    chosen = values.gather(1, torch.tensor(targets, device=values.device)[:, None])
    ranks = (values > chosen).sum(dim=1) + 1
    top = torch.topk(values, values.shape[1] if num_top < 0 else min(num_top, values.shape[1]), dim=1)
    rows = zip(targets, chosen[:, 0].tolist(), ranks.tolist(), top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        PositionLogprobs(
            chosen=TokenLogprob(token_id=target, logprob=value, rank=rank),
            top=tuple(
                TokenLogprob(token_id=token_id, logprob=alternative, rank=place)
                for place, (token_id, alternative) in enumerate(zip(best, best_values, strict=True), start=1)
            ),
        )
        for target, value, rank, best, best_values in rows
    ]

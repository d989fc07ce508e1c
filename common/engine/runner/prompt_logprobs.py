"""Log probabilities of prompt tokens, from the logits of the positions before them.

Journey row 3b (P computes them, the proxy merges). Owns: what is asked of one chunk. Does not know: requests.
"""

from collections.abc import Sequence

import torch

from common.engine.outputs import PositionLogprobs
from common.engine.sampling.cpu_kernels.library import kernels_for
from common.engine.sampling.logprobs import position_logprobs
from common.engine.sampling.row_parameters import LogprobRequest


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
    count = logits.shape[1] if num_top < 0 else num_top
    return position_logprobs(
        logits,
        torch.tensor(targets, dtype=torch.int64, device=logits.device),
        [LogprobRequest(count=count, token_ids=None)] * len(targets),
        normalise=not as_logits,
        kernels=kernels_for(logits.device),
    )

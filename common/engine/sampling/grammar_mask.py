"""Apply grammar bitmasks to logits.

Owns: unpacking (bit set = allowed; bit i of word w is token 32 w + i) and masking of only the rows that have one.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch


def apply_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, masked_rows: Sequence[int]) -> None:
    """Set the logits of forbidden tokens to -inf, in place.

    Args:
        logits: float32 [R, vocab_size].
        bitmask: int32 CPU [M, >= ceil(vocab_size / 32)].
        masked_rows: logits row of each bitmask row, length M, no row twice.
    """
    forbidden = _forbidden(bitmask, logits.shape[1], logits.device)
    if len(masked_rows) == logits.shape[0] and list(masked_rows) == list(range(logits.shape[0])):
        logits.masked_fill_(forbidden, -math.inf)
        return
    rows = torch.tensor(masked_rows, dtype=torch.int64, device=logits.device)
    logits[rows] = logits[rows].masked_fill_(forbidden, -math.inf)


def allows_only(bitmask_row: torch.Tensor, token_ids: Sequence[int]) -> bool:
    """Whether a bitmask row int32 [W] allows some of `token_ids` and nothing else."""
    words = bitmask_row.numpy().view(np.uint32)
    rest = words.copy()
    for token_id in token_ids:
        if token_id >> 5 < rest.size:
            rest[token_id >> 5] &= np.uint32(~(1 << (token_id & 31)) & 0xFFFFFFFF)
    return bool(words.any()) and not rest.any()


def _forbidden(bitmask: torch.Tensor, vocab_size: int, device: torch.device) -> torch.Tensor:
    """Bool [M, vocab_size] on `device`: the bits that are not set."""
    inverted = np.ascontiguousarray(~bitmask.numpy()).view(np.uint8)
    if device.type == "cpu":
        return torch.from_numpy(np.unpackbits(inverted, axis=1, count=vocab_size, bitorder="little").view(np.bool_))
    packed = torch.from_numpy(inverted).to(device)
    bits = torch.arange(8, dtype=torch.uint8, device=device)
    return ((packed.unsqueeze(2) >> bits) & 1).flatten(1)[:, :vocab_size].to(torch.bool)

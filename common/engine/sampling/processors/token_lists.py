"""Token ids per row, flattened into index tensors once per change of the batch.

Owns: the cached (logits row, token id) pairs several built-in processors work on. Does not know what they do with them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class TokenPairs:
    """Pairs (logits row, token id) as places in the flattened logits.

    Attributes:
        places: int64 [N], `row * vocab_size + token`, on the logits' device.
        rows: int64 [N], host.
    """

    places: torch.Tensor
    rows: np.ndarray[tuple[int], np.dtype[np.int64]]

    def where(self, keep: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> "TokenPairs":
        """The pairs whose `keep` (bool [N]) is set."""
        if keep.all():
            return self
        chosen = torch.from_numpy(np.flatnonzero(keep)).to(self.places.device)
        return TokenPairs(self.places[chosen], self.rows[keep])

    def values(self, logits: torch.Tensor) -> torch.Tensor:
        """Float32 [N] of contiguous `logits` [R, vocab_size]."""
        return logits.view(-1)[self.places]

    def set(self, logits: torch.Tensor, values: torch.Tensor) -> None:
        """Write float32 [N] into contiguous `logits`, in place."""
        logits.view(-1).index_copy_(0, self.places, values)

    def add(self, logits: torch.Tensor, values: torch.Tensor) -> None:
        """Add float32 [N] to contiguous `logits`, in place."""
        logits.view(-1).index_add_(0, self.places, values)

    def forbid(self, logits: torch.Tensor) -> None:
        """Mask the pairs in contiguous `logits`, in place."""
        logits.view(-1).index_fill_(0, self.places, -math.inf)


def flatten(lists: Sequence[tuple[int, Sequence[int]]], logits: torch.Tensor) -> TokenPairs:
    """Pairs of all (logits row, token ids) entries, for logits of this shape and device."""
    rows = np.repeat(
        np.array([row for row, _ in lists], dtype=np.int64),
        np.array([len(ids) for _, ids in lists], dtype=np.int64),
    )
    tokens = np.fromiter((token for _, ids in lists for token in ids), dtype=np.int64, count=rows.size)
    return TokenPairs(torch.from_numpy(rows * logits.shape[1] + tokens).to(logits.device), rows)

"""Token ids per row, flattened into index tensors once per change of the batch.

Owns: the cached (logits row, token id) pairs several built-in processors work on. Does not know what they do with them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class TokenPairs:
    """Pairs (logits row, token id): `rows` and `tokens` int64 [N] on the logits' device; `host_rows` int64 [N]."""

    rows: torch.Tensor
    tokens: torch.Tensor
    host_rows: np.ndarray[tuple[int], np.dtype[np.int64]]

    def where(self, keep: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> "TokenPairs":
        """The pairs whose `keep` (bool [N]) is set."""
        if keep.all():
            return self
        chosen = torch.from_numpy(np.flatnonzero(keep)).to(self.rows.device)
        return TokenPairs(self.rows[chosen], self.tokens[chosen], self.host_rows[keep])

    def fill(self, logits: torch.Tensor, value: float) -> None:
        """Set every pair of `logits` float32 [R, vocab_size] to `value`, in place."""
        if self.host_rows.size:
            logits.index_put_((self.rows, self.tokens), torch.tensor(value, device=logits.device))


def flatten(lists: Sequence[tuple[int, Sequence[int]]], device: torch.device) -> TokenPairs:
    """Pairs of all (logits row, token ids) entries."""
    host_rows = np.repeat(
        np.array([row for row, _ in lists], dtype=np.int64),
        np.array([len(ids) for _, ids in lists], dtype=np.int64),
    )
    tokens = np.fromiter((token for _, ids in lists for token in ids), dtype=np.int64, count=host_rows.size)
    return TokenPairs(torch.from_numpy(host_rows).to(device), torch.from_numpy(tokens).to(device), host_rows)

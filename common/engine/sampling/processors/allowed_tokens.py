"""`allowed_token_ids`: nothing else may be sampled.

Owns: the whitelist of each row, as bits where the kernels mask, as token ids elsewhere. Source: vLLM 0.32
`SamplingParams.allowed_token_ids`.
"""

import math

import numpy as np
import torch

from common.engine.sampling.batch_state import AddedRow, BatchUpdate, IntArray, LogitsRows, RowTable
from common.engine.sampling.cpu_kernels.library import SamplingKernels
from common.engine.sampling.processors.token_lists import TokenPairs, flatten


class AllowedTokens:
    """Masks all but the listed tokens of the rows that have a list.

    Args:
        kernels: mask by bits; None: torch does it.
    """

    def __init__(self, kernels: SamplingKernels | None = None) -> None:
        self._kernels = kernels
        self._table: RowTable[tuple[int, ...]] = RowTable(_listed)
        self._pairs: TokenPairs | None = None
        self._rows: torch.Tensor | None = None
        self._bits: tuple[torch.Tensor, IntArray] | None = None

    def is_used(self) -> bool:
        """Whether any row of the batch asks for it."""
        return bool(self._table)

    def update_state(self, update: BatchUpdate) -> None:
        """Follow the batch."""
        self._table.update(update)
        self._bits = None

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        """Mask `logits` in place."""
        if not self._table:
            return logits
        if self._kernels is not None:
            if not self._table.is_current(rows) or self._bits is None:
                self._bits = _bitmask(self._table.select(rows), logits.shape[1])
            self._kernels.mask(logits, *self._bits)
            return logits
        if not self._table.is_current(rows) or self._pairs is None or self._rows is None:
            selected = self._table.select(rows)
            self._pairs = flatten(selected, logits)
            self._rows = torch.tensor([row for row, _ in selected], dtype=torch.int64, device=logits.device)
        kept = self._pairs.values(logits)
        if self._rows.numel() == logits.shape[0]:
            logits.fill_(-math.inf)
        else:
            logits.index_fill_(0, self._rows, -math.inf)
        self._pairs.set(logits, kept)
        return logits


def _listed(added: AddedRow) -> tuple[int, ...] | None:
    return added.params.allowed_token_ids


def _bitmask(selected: list[tuple[int, tuple[int, ...]]], vocab_size: int) -> tuple[torch.Tensor, IntArray]:
    """One bit per token, int32 [n, ceil(vocab_size / 32)], and the logits rows they are for, int64 [n]."""
    allowed = np.zeros((len(selected), -(-vocab_size // 32) * 32), dtype=np.bool_)
    for place, (_, tokens) in enumerate(selected):
        allowed[place, list(tokens)] = True
    words = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    return torch.from_numpy(words), np.array([row for row, _ in selected], dtype=np.int64)

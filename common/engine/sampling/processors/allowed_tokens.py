"""`allowed_token_ids`: nothing else may be sampled.

Owns: the whitelist of each row. Source: vLLM 0.32 `SamplingParams.allowed_token_ids`.
"""

import math

import torch

from common.engine.sampling.batch_state import AddedRow, BatchUpdate, LogitsRows, RowTable
from common.engine.sampling.processors.token_lists import TokenPairs, flatten


class AllowedTokens:
    """Masks all but the listed tokens of the rows that have a list."""

    def __init__(self) -> None:
        self._table: RowTable[tuple[int, ...]] = RowTable(_listed)
        self._pairs: TokenPairs | None = None
        self._rows: torch.Tensor | None = None

    def is_used(self) -> bool:
        """Whether any row of the batch asks for it."""
        return bool(self._table)

    def update_state(self, update: BatchUpdate) -> None:
        """Follow the batch."""
        self._table.update(update)

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        """Mask `logits` in place."""
        if not self._table:
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

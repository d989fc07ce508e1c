"""`min_tokens`: no EOS and no stop token before that many tokens.

Owns: which stop ids each row masks, and until when. Where a grammar allows nothing but a stop token the grammar wins:
masking it too would leave no token at all. Source: vLLM 0.32 `MinTokensLogitsProcessor`; the grammar rule is ours.
"""

import numpy as np
import torch

from common.engine.sampling.batch_state import AddedRow, BatchUpdate, LogitsRows, RowTable
from common.engine.sampling.processors.token_lists import TokenPairs, flatten


class MinTokens:
    """Masks every stop id of a row while its output position is below `min_tokens`."""

    def __init__(self) -> None:
        self._table: RowTable[tuple[int, tuple[int, ...]]] = RowTable(_minimum)
        self._pairs: TokenPairs | None = None
        self._pairs_of: tuple[int, ...] | None = None
        self._minimum = np.empty(0, dtype=np.int64)

    def stop_ids(self, rows: LogitsRows) -> list[tuple[int, tuple[int, ...]]]:
        """(logits row, stop ids) of the rows it still masks in this step."""
        if not self._table:
            return []
        return [(row, stops) for row, (minimum, stops) in self._table.select(rows) if rows.positions[row] < minimum]

    def is_used(self) -> bool:
        """Whether any row of the batch asks for it."""
        return bool(self._table)

    def update_state(self, update: BatchUpdate) -> None:
        """Follow the batch."""
        self._table.update(update)
        self._pairs = None

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        """Mask `logits` in place."""
        if not self._table:
            return logits
        if self._pairs is None or self._pairs_of is not rows.persistent:
            self._pairs_of = rows.persistent
            selected = self._table.select(rows)
            self._pairs = flatten([(row, stops) for row, (_, stops) in selected], logits)
            self._minimum = np.repeat(
                np.array([minimum for _, (minimum, _) in selected], dtype=np.int64),
                np.array([len(stops) for _, (_, stops) in selected], dtype=np.int64),
            )
        active = rows.positions[self._pairs.rows] < self._minimum
        if rows.must_stop:
            active &= ~np.isin(self._pairs.rows, list(rows.must_stop))
        if active.any():
            self._pairs.where(active).forbid(logits)
        return logits


def _minimum(added: AddedRow) -> tuple[int, tuple[int, ...]] | None:
    if added.params.min_tokens <= len(added.output_token_ids) or not added.stop_ids:
        return None
    return added.params.min_tokens, tuple(sorted(added.stop_ids))

"""`logit_bias`: a number added to the logits of named tokens.

Owns: the biases of each row. Source: OpenAI API reference (`logit_bias`), clamped to ±100 as in vLLM 0.32.
"""

import torch

from common.engine.sampling.batch_state import AddedRow, BatchUpdate, LogitsRows, RowTable
from common.engine.sampling.processors.token_lists import TokenPairs, flatten


class LogitBias:
    """Adds biases; a masked token (-inf) stays masked."""

    def __init__(self) -> None:
        self._table: RowTable[tuple[tuple[int, float], ...]] = RowTable(_biases)
        self._pairs: TokenPairs | None = None
        self._values = torch.empty(0)

    def is_used(self) -> bool:
        """Whether any row of the batch asks for it."""
        return bool(self._table)

    def update_state(self, update: BatchUpdate) -> None:
        """Follow the batch."""
        self._table.update(update)

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        """Add in place."""
        if not self._table:
            return logits
        if not self._table.is_current(rows) or self._pairs is None:
            selected = self._table.select(rows)
            self._pairs = flatten([(row, [token for token, _ in biases]) for row, biases in selected], logits)
            flat = [bias for _, biases in selected for _, bias in biases]
            self._values = torch.tensor(flat, dtype=torch.float32, device=logits.device)
        self._pairs.add(logits, self._values)
        return logits


def _biases(added: AddedRow) -> tuple[tuple[int, float], ...] | None:
    return added.params.logit_bias or None

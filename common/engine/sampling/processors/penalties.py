"""Repetition, frequency and presence penalties from persistent counts.

Owns: which tokens each penalised row has seen, and how often. Work per step grows with the distinct tokens seen,
not with the vocabulary or the history. Definitions: repetition over prompt and output (Keskar et al. 2019,
section 4.1); frequency and presence over the output (OpenAI API reference).
"""

import torch

from common.engine.sampling.batch_state import AddedRow, BatchUpdate, IntArray, LogitsRows, RowTable
from common.engine.sampling.processors.seen_tokens import SeenTokens


class Penalties:
    """Lowers (or raises) the logits of tokens a row has already seen.

    Args:
        vocab_size: width of the logits.
        max_rows: persistent rows.
        device: where the logits live.
    """

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self._device = device
        self._seen = SeenTokens(vocab_size, max_rows, device)
        self._table: RowTable[tuple[float, float, float]] = RowTable(_strengths)
        self._rows: torch.Tensor | None = None
        self._slots = torch.empty(0, dtype=torch.int64)
        self._strengths = torch.empty(0)
        self._persistent: tuple[int, ...] = ()

    def is_used(self) -> bool:
        """Whether any row of the batch asks for it."""
        return bool(self._table)

    def update_state(self, update: BatchUpdate) -> None:
        """Follow the batch; an added row's whole prompt and output are counted once, here."""
        self._table.update(update)
        self._rows = None
        for row in update.removed:
            self._seen.drop(row)
        for added in update.added:
            if _strengths(added) is not None:
                repeats = added.params.repetition_penalty != 1.0
                self._seen.start(added.row, added.prompt_token_ids if repeats else (), added.output_token_ids)
        for moved in update.moved:
            self._seen.move(moved.source, moved.target)

    def record(self, rows: IntArray, token_ids: IntArray) -> None:
        """One token was accepted by each of the persistent `rows` (no row twice)."""
        if self._table:
            self._seen.count(rows, token_ids)

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        """Change `logits` in place."""
        if not self._table:
            return logits
        if not self._table.is_current(rows) or self._rows is None:
            self._collect(rows)
        if self._rows is None or not self._rows.numel():
            return logits
        drafts = [rows.drafts[row] for row, _ in self._table.select(rows)] if rows.drafts else []
        ids, counts, in_prompt = self._seen.of(self._persistent, self._slots, drafts)
        if not ids.shape[1]:
            return logits
        where = self._rows.unsqueeze(1)
        repetition, frequency, presence = self._strengths.unbind(1)
        values = logits[where, ids]
        touched = in_prompt | (counts > 0)
        factor = torch.where(touched, repetition.unsqueeze(1), 1.0)
        values = torch.where(values > 0, values / factor, values * factor)
        values -= frequency.unsqueeze(1) * counts
        values -= presence.unsqueeze(1) * (counts > 0)
        logits[where, ids] = values
        return logits

    def _collect(self, rows: LogitsRows) -> None:
        selected = self._table.select(rows)
        self._persistent = tuple(rows.persistent[row] for row, _ in selected)
        self._rows = torch.tensor([row for row, _ in selected], dtype=torch.int64, device=self._device)
        self._slots = self._seen.slots(self._persistent)
        self._strengths = torch.tensor([strengths for _, strengths in selected], device=self._device).view(-1, 3)


def _strengths(added: AddedRow) -> tuple[float, float, float] | None:
    params = added.params
    strengths = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    return None if strengths == (1.0, 0.0, 0.0) else strengths

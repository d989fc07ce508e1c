"""`bad_words`: the last token of a word is masked where the output ends with all of it but that token.

Owns: the words of each row and the last tokens of its output. A match never reaches into the prompt, and drafts count
as output. Source: vLLM 0.32 `v1/sample/ops/bad_words.py` (the rule); matching all words of all rows at once is ours.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.engine.sampling.batch_state import AddedRow, BatchUpdate, IntArray, LogitsRows, RowTable

_ANY = -1
"""In a padded prefix: matches whatever is there."""
_NOTHING = -2
"""In a tail: before the first output token."""


@dataclass(frozen=True, slots=True)
class _Watched:
    words: tuple[tuple[int, ...], ...]
    outputs: Sequence[int]

    @property
    def longest_prefix(self) -> int:
        """Tokens of the longest word without its last."""
        return max(len(word) for word in self.words) - 1


@dataclass(frozen=True, slots=True)
class _Entries:
    """Words of a step's rows: logits row int64 [N], prefix int64 [N, width] padded left, last token int64 [N]."""

    rows: IntArray
    prefixes: IntArray
    last: IntArray


class BadWords:
    """Masks the token that would complete a bad word.

    Args:
        max_rows: persistent rows.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._table: RowTable[_Watched] = RowTable(_watched)
        self._tails: IntArray = np.full((max_rows, 0), _NOTHING, dtype=np.int64)
        self._entries: _Entries | None = None

    def is_used(self) -> bool:
        """Whether any row of the batch asks for it."""
        return bool(self._table)

    def update_state(self, update: BatchUpdate) -> None:
        """Follow the batch."""
        self._table.update(update)
        self._entries = None
        if not self._table:
            return
        width = max(watched.longest_prefix for _, watched in self._table.items())
        self._tails = np.full((self._max_rows, width), _NOTHING, dtype=np.int64)
        for row, watched in self._table.items():
            _write_tail(self._tails[row], watched.outputs)

    def record(self, rows: IntArray, token_ids: IntArray) -> None:
        """One token was accepted by each of the persistent `rows` (no row twice)."""
        if self._table and self._tails.shape[1]:
            self._tails[rows, :-1] = self._tails[rows, 1:]
            self._tails[rows, -1] = token_ids

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        """Mask `logits` in place."""
        if not self._table:
            return logits
        if not self._table.is_current(rows) or self._entries is None:
            self._entries = self._collect(rows)
        entries = self._entries
        if not entries.rows.size:
            return logits
        tails = self._tails[np.asarray(rows.persistent)]
        for position, drafts in enumerate(rows.drafts):
            _push(tails[position], drafts)
        ends = tails[entries.rows]
        hits = ((ends == entries.prefixes) | (entries.prefixes == _ANY)).all(axis=1)
        if hits.any():
            where = torch.from_numpy(entries.rows[hits]).to(logits.device)
            tokens = torch.from_numpy(entries.last[hits]).to(logits.device)
            logits.index_put_((where, tokens), torch.tensor(-math.inf, device=logits.device))
        return logits

    def _collect(self, rows: LogitsRows) -> _Entries:
        words = [(row, word) for row, watched in self._table.select(rows) for word in watched.words]
        prefixes = np.full((len(words), self._tails.shape[1]), _ANY, dtype=np.int64)
        for entry, (_, word) in enumerate(words):
            if len(word) > 1:
                prefixes[entry, 1 - len(word) :] = word[:-1]
        return _Entries(
            rows=np.array([row for row, _ in words], dtype=np.int64),
            prefixes=prefixes,
            last=np.array([word[-1] for _, word in words], dtype=np.int64),
        )


def _watched(added: AddedRow) -> _Watched | None:
    words = added.params.bad_words_token_ids
    return _Watched(words, added.output_token_ids) if words else None


def _write_tail(tail: IntArray, outputs: Sequence[int]) -> None:
    """Fill `tail` int64 [width] with the last outputs, in place."""
    width = min(tail.shape[0], len(outputs))
    if width:
        tail[-width:] = outputs[-width:]


def _push(tail: IntArray, token_ids: Sequence[int]) -> None:
    """Shift tokens into `tail` int64 [width], in place."""
    count = min(tail.shape[0], len(token_ids))
    if count:
        tail[:-count] = tail[count:].copy()
        tail[-count:] = token_ids[-count:]

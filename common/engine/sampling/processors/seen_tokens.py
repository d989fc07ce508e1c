"""Distinct tokens of each penalised row with their counts, kept up to date token by token.

Owns: tensors that grow with the number of penalised rows and the longest list of distinct tokens.

    slot s:  ids    | 17 | 402 | 9 | ... |  unused  |     at most `capacity` distinct tokens
             counts |  3 |   0 | 1 |     |          |     occurrences in the output
             prompt |  0 |   1 | 1 |     |          |     occurs in the prompt
    place[s, token] = index into the list + 1, or 0
"""

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
import torch

from common.engine.sampling.batch_state import IntArray

_NO_SLOT = -1


class SeenTokens:
    """Counts per persistent row; rows get a slot while they are penalised.

    Args:
        vocab_size: token ids are below this; others (padding of a foreign prompt) are ignored.
        max_rows: persistent rows.
        device: where the counts live.
    """

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._slot_of: IntArray = np.full(max_rows, _NO_SLOT, dtype=np.int64)
        self._free: list[int] = []
        self._lengths: IntArray = np.zeros(0, dtype=np.int64)
        self._ids = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self._counts = torch.zeros(0, 0, dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros(0, 0, dtype=torch.bool, device=device)
        self._place = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)

    def start(self, row: int, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> None:
        """Give `row` a slot holding what it has seen so far."""
        prompt = self._known(prompt_token_ids)
        output, counts = np.unique(self._known(output_token_ids), return_counts=True)
        ids = np.union1d(prompt, output)
        slot = self._take_slot(len(ids))
        self._slot_of[row] = slot
        self._lengths[slot] = len(ids)
        all_counts = np.zeros(len(ids), dtype=np.int32)
        all_counts[np.searchsorted(ids, output)] = counts
        tokens = torch.from_numpy(ids).to(self._device)
        self._ids[slot, : len(ids)] = tokens
        self._counts[slot, : len(ids)] = torch.from_numpy(all_counts).to(self._device)
        self._in_prompt[slot, : len(ids)] = torch.from_numpy(np.isin(ids, prompt)).to(self._device)
        self._place[slot].zero_()
        self._place[slot, tokens] = torch.arange(1, len(ids) + 1, dtype=torch.int32, device=self._device)

    def drop(self, row: int) -> None:
        """Free the slot of `row`, if it has one."""
        slot = int(self._slot_of[row])
        if slot != _NO_SLOT:
            self._slot_of[row] = _NO_SLOT
            self._free.append(slot)

    def move(self, source: int, target: int) -> None:
        """The slot of `source`, if any, now belongs to `target`."""
        self._slot_of[target] = self._slot_of[source]
        self._slot_of[source] = _NO_SLOT

    def count(self, rows: IntArray, token_ids: IntArray) -> None:
        """Count one more output token of each row that has a slot (no row twice)."""
        slots = self._slot_of[rows]
        has_slot = slots != _NO_SLOT
        if not has_slot.any():
            return
        slots, token_ids = slots[has_slot], token_ids[has_slot]
        self._reserve(int(self._lengths[slots].max()) + 1)
        where = torch.from_numpy(slots).to(self._device)
        tokens = torch.from_numpy(token_ids).to(self._device)
        ends = torch.from_numpy(self._lengths[slots]).to(self._device)
        places = self._place[where, tokens].to(torch.int64)
        is_new = places == 0
        at = torch.where(is_new, ends, places - 1)
        self._ids[where, at] = tokens
        self._counts[where, at] = torch.where(is_new, 0, self._counts[where, at]) + 1
        self._in_prompt[where, at] &= ~is_new
        self._place[where, tokens] = (at + 1).to(torch.int32)
        self._lengths[slots] += is_new.cpu().numpy()

    def slots(self, rows: Sequence[int]) -> torch.Tensor:
        """Slots int64 [len(rows)] of rows that have one."""
        return torch.from_numpy(self._slot_of[np.asarray(rows, dtype=np.int64)]).to(self._device)

    def of(
        self, rows: Sequence[int], slots: torch.Tensor, drafts: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Seen tokens of rows: ids int64, output counts int32 and in-prompt bool, each [len(rows), L].

        Shorter rows are filled up with copies of one of their own entries, so writing a function of (id, count) back by
        id is safe; a row that has seen nothing holds copies of (id 0, count 0, not in prompt).

        Args:
            rows: persistent rows, all with a slot.
            slots: their slots.
            drafts: per row, tokens to count as output beyond those recorded; empty: none.
        """
        lengths = torch.from_numpy(self._lengths[self._slot_of[np.asarray(rows, dtype=np.int64)]]).to(self._device)
        longest = int(self._lengths[self._slot_of[np.asarray(rows, dtype=np.int64)]].max(initial=0))
        ids = self._ids[slots, :longest]
        counts = self._counts[slots, :longest]
        in_prompt = self._in_prompt[slots, :longest]
        valid = torch.arange(longest, device=self._device) < lengths.unsqueeze(1)
        if any(drafts):
            ids, counts, in_prompt, valid = _with_drafts(ids, counts, in_prompt, valid, drafts)
        if not ids.shape[1]:
            return ids, counts, in_prompt
        # An entry that counts stands in for the unused ones; where there is none, (0, 0, False) does.
        first = valid.to(torch.int8).argmax(dim=1, keepdim=True)
        empty = ~valid.any(dim=1, keepdim=True)
        return (
            torch.where(valid, ids, ids.gather(1, first).masked_fill(empty, 0)),
            torch.where(valid, counts, counts.gather(1, first).masked_fill(empty, 0)),
            torch.where(valid, in_prompt, in_prompt.gather(1, first).masked_fill(empty, value=False)),
        )

    def _known(self, token_ids: Sequence[int]) -> IntArray:
        ids = np.asarray(token_ids, dtype=np.int64)
        return ids[(ids >= 0) & (ids < self._vocab_size)]

    def _take_slot(self, num_ids: int) -> int:
        self._reserve(num_ids + 64)
        if not self._free:
            have = self._ids.shape[0]
            more = max(4, have)
            self._free.extend(range(have, have + more))
            self._lengths = np.concatenate((self._lengths, np.zeros(more, dtype=np.int64)))
            self._ids = _padded(self._ids, more, 0)
            self._counts = _padded(self._counts, more, 0)
            self._in_prompt = _padded(self._in_prompt, more, 0)
            self._place = _padded(self._place, more, 0)
        return self._free.pop()

    def _reserve(self, num_ids: int) -> None:
        """Make room for `num_ids` distinct tokens in every slot; doubles, so growing is rare."""
        have = self._ids.shape[1]
        if num_ids > have:
            more = max(num_ids, 2 * have) - have
            self._ids = _padded(self._ids, 0, more)
            self._counts = _padded(self._counts, 0, more)
            self._in_prompt = _padded(self._in_prompt, 0, more)


def _padded(tensor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """`tensor` [n, m] with zero rows and columns added at the end."""
    grown = tensor.new_zeros(tensor.shape[0] + rows, tensor.shape[1] + columns)
    grown[: tensor.shape[0], : tensor.shape[1]] = tensor
    return grown


def _with_drafts(
    ids: torch.Tensor,
    counts: torch.Tensor,
    in_prompt: torch.Tensor,
    valid: torch.Tensor,
    drafts: Sequence[Sequence[int]],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Count drafts as output: entries that exist get more, tokens not seen yet get columns of their own."""
    columns = list(zip_longest(*drafts, fillvalue=-1))
    extra = torch.tensor(columns, dtype=torch.int64, device=ids.device).T  # [rows, longest draft]
    is_draft = extra >= 0
    equal = (ids.unsqueeze(2) == extra.unsqueeze(1)) & valid.unsqueeze(2) & is_draft.unsqueeze(1)
    among = (extra.unsqueeze(2) == extra.unsqueeze(1)) & is_draft.unsqueeze(1)
    return (
        torch.cat((ids, extra.clamp(min=0)), dim=1),
        torch.cat((counts + equal.sum(dim=2), among.sum(dim=2)), dim=1),
        torch.cat((in_prompt, torch.zeros_like(is_draft)), dim=1),
        torch.cat((valid, is_draft & ~equal.any(dim=1)), dim=1),
    )

"""`thinking_token_budget`: after that many thinking tokens the end marker is forced, token by token.

Owns: where each budgeted row stands (thinking, inside a tool call, tokens thought). The prompt counts too: a chat
template may have opened the section. The budget is for the whole output: a section opened again after it is used up
is closed at once. Nothing is forced inside a tool call. Source: vLLM 0.32 `v1/sample/thinking_budget_state.py`
(forcing after the penalties, counting from the prompt); budget per output and the tool rule are ours.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch

from common.engine.sampling.batch_state import BatchUpdate, IntArray, LogitsRows

_NOTHING = -2
_NO_BUDGET = -1
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputMarkers:
    """Token ids that open and close sections of an output; a marker may be several tokens, empty: it has none."""

    think_start: tuple[int, ...]
    think_end: tuple[int, ...]
    tool_start: tuple[int, ...] = ()
    tool_end: tuple[int, ...] = ()

    @property
    def longest(self) -> int:
        """Tokens of the longest marker."""
        return max(len(marker) for marker in (self.think_start, self.think_end, self.tool_start, self.tool_end))


@dataclass(slots=True)
class _Progress:
    """State of N rows: budget and used int64 [N], thinking and in_tool bool [N], tail int64 [N, longest marker]."""

    budget: IntArray
    used: IntArray
    thinking: BoolArray
    in_tool: BoolArray
    tail: IntArray

    @classmethod
    def empty(cls, num_rows: int, width: int) -> "_Progress":
        """Rows without a budget that have said nothing."""
        return cls(
            budget=np.full(num_rows, _NO_BUDGET, dtype=np.int64),
            used=np.zeros(num_rows, dtype=np.int64),
            thinking=np.zeros(num_rows, dtype=np.bool_),
            in_tool=np.zeros(num_rows, dtype=np.bool_),
            tail=np.full((num_rows, width), _NOTHING, dtype=np.int64),
        )

    def copy_of(self, rows: IntArray) -> "_Progress":
        """The state of some rows, for `put`."""
        return _Progress(*(getattr(self, field.name)[rows] for field in fields(self)))

    def put(self, rows: IntArray, part: "_Progress") -> None:
        """Write the state of some rows."""
        for field in fields(self):
            getattr(self, field.name)[rows] = getattr(part, field.name)


class ThinkingBudget:
    """Forces the end-of-thinking marker.

    Args:
        max_rows: persistent rows.
        markers: the model's markers; `think_start` and `think_end` are not empty.
    """

    def __init__(self, max_rows: int, markers: OutputMarkers) -> None:
        self._markers = markers
        self._marker_tokens = {*markers.think_start, *markers.think_end, *markers.tool_start, *markers.tool_end}
        self._all = _Progress.empty(max_rows, markers.longest)

    def is_used(self) -> bool:
        """Whether any row of the batch asks for it."""
        return bool((self._all.budget != _NO_BUDGET).any())

    def update_state(self, update: BatchUpdate) -> None:
        """Follow the batch; an added row's prompt and output are replayed once, here."""
        for row in update.removed:
            self._all.budget[row] = _NO_BUDGET
        for added in update.added:
            budget = added.params.thinking_token_budget
            self._all.budget[added.row] = _NO_BUDGET if budget is None else budget
            if budget is not None:
                self._replay(added.row, budget, added.prompt_token_ids, added.output_token_ids)
        for moved in update.moved:
            source = np.array([moved.source])
            self._all.put(np.array([moved.target]), self._all.copy_of(source))
            self._all.budget[moved.source] = _NO_BUDGET

    def record(self, rows: IntArray, token_ids: IntArray) -> None:
        """One token was accepted by each of the persistent `rows` (no row twice)."""
        budgeted = self._all.budget[rows] != _NO_BUDGET
        if budgeted.any():
            rows = rows[budgeted]
            part = self._all.copy_of(rows)
            self._step(part, token_ids[budgeted])
            self._all.put(rows, part)

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        """Leave only the next token of the end marker, in place, for the rows that must stop thinking."""
        part = self._all.copy_of(np.asarray(rows.persistent))
        if not (part.budget != _NO_BUDGET).any():
            return logits
        if rows.drafts:
            self._assume(part, rows.drafts)
        force = part.thinking & ~part.in_tool & (part.used >= part.budget) & (part.budget != _NO_BUDGET)
        if not force.any():
            return logits
        forced_rows = np.flatnonzero(force)
        tokens = np.asarray(self._markers.think_end)[self._marker_progress(part.tail[forced_rows])]
        where = torch.from_numpy(forced_rows).to(logits.device)
        to = torch.from_numpy(tokens).to(logits.device)
        values = logits[where, to]
        # Only a grammar may forbid the marker: then the structure it enforces matters more than the budget.
        free = torch.tensor([int(row) not in rows.constrained for row in forced_rows], device=logits.device)
        values = torch.where(free & values.isinf(), 0.0, values)
        allowed = ~values.isinf()
        logits.index_fill_(0, where[allowed], -math.inf)
        logits[where[allowed], to[allowed]] = values[allowed]
        return logits

    def _replay(self, row: int, budget: int, prompt: Sequence[int], outputs: Sequence[int]) -> None:
        """State after a known text. Thinking closed in the prompt is history and does not count."""
        part = _Progress.empty(1, self._markers.longest)
        part.budget[:] = budget
        opened = _end_of_last(prompt, self._markers.think_start)
        if opened > _end_of_last(prompt, self._markers.think_end):
            part.thinking[:] = True
            part.used[:] = len(prompt) - opened
        for token_id in outputs:
            if token_id in self._marker_tokens:
                self._step(part, np.array([token_id]))
            else:
                part.used += part.thinking
                part.tail[:] = _NOTHING
        self._all.put(np.array([row]), part)

    def _assume(self, part: _Progress, drafts: tuple[tuple[int, ...], ...]) -> None:
        for depth in range(max(len(draft) for draft in drafts)):
            deep = np.array([row for row, draft in enumerate(drafts) if len(draft) > depth])
            deeper = part.copy_of(deep)
            self._step(deeper, np.array([drafts[row][depth] for row in deep]))
            part.put(deep, deeper)

    def _step(self, part: _Progress, token_ids: IntArray) -> None:
        """Advance every row of `part` by one token, in place."""
        part.tail[:, :-1] = part.tail[:, 1:].copy()
        part.tail[:, -1] = token_ids
        markers = self._markers
        tool_starts = _ends_with(part.tail, markers.tool_start)
        part.in_tool = (part.in_tool | tool_starts) & ~_ends_with(part.tail, markers.tool_end)
        part.used += part.thinking
        starts = _ends_with(part.tail, markers.think_start) & ~part.in_tool
        ends = _ends_with(part.tail, markers.think_end) & part.thinking
        part.thinking = (part.thinking | starts) & ~ends
        part.used -= ends * len(markers.think_end)  # the marker itself is not thought

    def _marker_progress(self, tails: IntArray) -> IntArray:
        """How many tokens of the end marker each tail int64 [N, width] already ends with, int64 [N]."""
        end = self._markers.think_end
        progress = np.zeros(tails.shape[0], dtype=np.int64)
        for length in range(1, len(end)):
            progress[_ends_with(tails, end[:length])] = length
        return progress


def _ends_with(tails: IntArray, marker: tuple[int, ...]) -> BoolArray:
    """Which tails int64 [N, width] end with `marker`; none for an empty marker."""
    if not marker:
        return np.zeros(tails.shape[0], dtype=np.bool_)
    return np.asarray((tails[:, -len(marker) :] == np.asarray(marker)).all(axis=1), dtype=np.bool_)


def _end_of_last(token_ids: Sequence[int], marker: tuple[int, ...]) -> int:
    """Index after the last occurrence of `marker` in `token_ids`; 0 when there is none."""
    for end in range(len(token_ids), len(marker) - 1, -1):
        if tuple(token_ids[end - len(marker) : end]) == marker:
            return end
    return 0

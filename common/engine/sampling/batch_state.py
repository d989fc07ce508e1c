"""What changed in the persistent batch, and which logits row belongs to which of its rows.

Journey row 8. Owns: the frozen values the engine core hands to the sampler and to every logits processor, and the table
that follows them. A persistent row belongs to one choice of one request from `added` to `removed`. Does not know what
a processor keeps per row.
"""

from collections.abc import Callable, ItemsView, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from common.engine.sampling.params import SamplingParams
from common.ids import RequestId

IntArray = npt.NDArray[np.int64]
ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedRow:
    """One choice of one request enters the batch (admitted, resumed after preemption, or forked).

    Attributes:
        row: persistent row, `0 <= row < max_rows`, free when this is applied.
        request_id: for error texts only.
        params: normalised parameters.
        prompt_token_ids: the whole prompt, on D too (repetition penalty and thinking state need it).
        output_token_ids: tokens already accepted: empty on admission, all of them after preemption. Processors get a
            live view in its place, which grows with `Sampler.record`.
        stop_ids: EOS ids and `stop_token_ids`; never sampled before `min_tokens`.
        seed: 64 bits, either sign; `common.engine.sampling.random.seed_for_choice` makes it.
    """

    row: int
    request_id: RequestId
    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    stop_ids: frozenset[int]
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedRow:
    """Everything of row `source` now lives in row `target`, which is free when this is applied."""

    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchUpdate:
    """Changes since the last step, applied in this order: all of `removed`, then `added`, then `moved` one by one.

    So an added row may take a row removed in the same update, and a move may fill one that is still free.
    Source: vLLM 0.32 `v1/sample/logits_processor/interface.py` (the order); swaps are not needed here.
    """

    removed: tuple[int, ...] = ()
    added: tuple[AddedRow, ...] = ()
    moved: tuple[MovedRow, ...] = ()


NO_CHANGE = BatchUpdate()
"""What an update is that changes nothing; the same object whenever the rows and their order stayed, too."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogitsRows:
    """Which persistent row each logits row of a step belongs to; several may belong to one (speculation).

    Attributes:
        persistent: persistent row of each logits row, length R. The same object as in the step before whenever
            neither the rows nor the batch changed, so what depends on nothing else may be kept by identity.
        index: the same, int64 [R] on the sampler's device.
        positions: output position of the token each logits row predicts, int64 [R], host.
        drafts: tokens assumed accepted before each logits row, beyond those recorded; empty without speculation.
        constrained: logits rows under a grammar mask.
        must_stop: of those, the ones whose grammar allows nothing but a stop token (known where `min_tokens` asks).
    """

    persistent: tuple[int, ...]
    index: torch.Tensor
    positions: IntArray
    drafts: tuple[tuple[int, ...], ...] = ()
    constrained: frozenset[int] = frozenset()
    must_stop: frozenset[int] = frozenset()


class RowTable(Generic[ValueT]):
    """Values of the persistent rows that have one, moved along with the batch.

    Args:
        make: the value of an added row; None where the row needs none.
    """

    def __init__(self, make: Callable[[AddedRow], ValueT | None]) -> None:
        self._make = make
        self._values: dict[int, ValueT] = {}
        self._seen: tuple[int, ...] | None = None
        self._selected: list[tuple[int, ValueT]] = []

    def __bool__(self) -> bool:
        return bool(self._values)

    def items(self) -> ItemsView[int, ValueT]:
        """(persistent row, value) of every row that has one."""
        return self._values.items()

    def update(self, update: BatchUpdate) -> None:
        """Follow the batch."""
        self._seen = None
        for row in update.removed:
            self._values.pop(row, None)
        for added in update.added:
            value = self._make(added)
            if value is not None:
                self._values[added.row] = value
        for moved in update.moved:
            if moved.source in self._values:
                self._values[moved.target] = self._values.pop(moved.source)

    def is_current(self, rows: LogitsRows) -> bool:
        """Whether `select` would answer as it did last time."""
        return self._seen is rows.persistent

    def select(self, rows: LogitsRows) -> list[tuple[int, ValueT]]:
        """(logits row, value) of the logits rows that have one, in order; computed anew only when something changed."""
        if not self.is_current(rows):
            self._seen = rows.persistent
            self._selected = [
                (position, self._values[row]) for position, row in enumerate(rows.persistent) if row in self._values
            ]
        return self._selected

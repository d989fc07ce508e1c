"""The persistent batch: one row per running request, kept from step to step so that a step costs only what is new.

Journey row 8. Owns: which request sits in which row, the rows' block tables, and the changes told to the sampler.
Rows are dense: with n requests they are 0..n-1. Does not know: models, logits.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from common.engine.sampling.batch_state import NO_CHANGE, AddedRow, BatchUpdate, MovedRow
from common.engine.scheduling.sequence import Request
from common.engine.step import StepPlan
from common.errors import Bug
from common.ids import RequestId


class InputBatch:
    """Rows of the running requests.

    Attributes:
        block_tables: int32 `[max_rows, max_blocks_per_seq]` on the host, as of the last `append_blocks`; behind a row's
            first `num_blocks[r]` entries there is nothing but 0.
        num_blocks: int32 `[max_rows]`.

    Args:
        max_rows: most requests that run at a time.
        max_blocks_per_seq: blocks of the longest sequence.
    """

    def __init__(self, max_rows: int, max_blocks_per_seq: int) -> None:
        self.block_tables: npt.NDArray[np.int32] = np.zeros((max_rows, max_blocks_per_seq), dtype=np.int32)
        self.num_blocks: npt.NDArray[np.int32] = np.zeros(max_rows, dtype=np.int32)
        self._max_rows = max_rows
        self._requests: list[Request] = []
        self._row_of: dict[RequestId, int] = {}
        self._key_at: list[RequestId | None] = [None] * max_rows

    def __len__(self) -> int:
        return len(self._row_of)

    def row(self, request: Request) -> int:
        """The row of a request in the batch."""
        return self._row_of[request.key]

    def update(self, plan: StepPlan) -> BatchUpdate:
        """Follow the plan: rows of those that left are emptied, newcomers fill them, the rest closes up.

        Returns:
            The same changes for the sampler; `NO_CHANGE` when the plan has the same requests in the same order as the
            last one, and nobody left. Cost: the rows that change.
        """
        requests = [chunk.request for chunk in plan.chunks]
        if requests == self._requests and not plan.left:
            return NO_CHANGE
        self._requests = requests
        removed = self._remove(plan)
        entering = [request for request in requests if request.key not in self._row_of]
        if len(self._row_of) + len(entering) > self._max_rows:
            raise Bug(f"{len(self._row_of)} + {len(entering)} requests do not fit {self._max_rows} rows")
        holes = sorted(removed)
        added = [self._enter(request, holes) for request in entering]
        moved = self._close_up(holes)
        return BatchUpdate(removed=tuple(removed), added=tuple(added), moved=tuple(moved))

    def _remove(self, plan: StepPlan) -> list[int]:
        removed = []
        for key in plan.left:
            row = self._row_of.pop(key, None)
            if row is not None:  # admitted and gone between two forwards: it never had one
                self._key_at[row] = None
                self._clear(row)
                removed.append(row)
        return removed

    def _enter(self, request: Request, holes: list[int]) -> AddedRow:
        row = holes.pop(0) if holes else len(self._row_of)
        self._row_of[request.key] = row
        self._key_at[row] = request.key
        return AddedRow(
            row=row,
            request_id=request.request_id,
            params=request.sampling,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=tuple(request.output_token_ids),
            stop_ids=request.stop_ids,
            seed=request.seed,
        )

    def _close_up(self, holes: list[int]) -> list[MovedRow]:
        """Move the highest rows into the remaining `holes` (ascending) until rows are dense again."""
        moved = []
        num_rows = len(self._row_of)
        source = num_rows + len(holes) - 1
        for target in holes:
            if target >= num_rows:
                break
            while self._key_at[source] is None:
                source -= 1
            key = self._key_at[source]
            assert key is not None  # the loop above stopped at a taken row
            self.block_tables[target], self.num_blocks[target] = self.block_tables[source], self.num_blocks[source]
            self._clear(source)
            self._key_at[target], self._key_at[source] = key, None
            self._row_of[key] = target
            moved.append(MovedRow(source=source, target=target))
        return moved

    def append_blocks(self, requests: Iterable[Request]) -> None:
        """Bring the block tables of these requests, which have rows, up to date. Cost: the blocks that are new."""
        for request in requests:
            row, table = self._row_of[request.key], request.holding.table
            known = int(self.num_blocks[row])
            if len(table) > known:
                self.block_tables[row, known : len(table)] = table.slice(known)
                self.num_blocks[row] = len(table)

    def _clear(self, row: int) -> None:
        self.block_tables[row, : self.num_blocks[row]] = 0
        self.num_blocks[row] = 0

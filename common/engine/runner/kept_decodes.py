"""The batch of a plain decode, kept and moved on by one token as long as the same requests decode.

Journey row 8. Owns: the kept arrays, and when they may be moved on: everything else is built anew. Most steps are like
this, and what they touch lies far away after a forward, so it is one small array, one addition and the new tokens.
Does not know: how a batch is built anew.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from common.engine.kv_cache.storage import KvCacheStorage
from common.engine.model.forward import ForwardBatch
from common.engine.step import ScheduledChunk


class KeptDecodes:
    """One token of each of some sequences, in the order of the plan.

    On the CPU its tensors are the memory of the next step's, too: a batch is what it was made as until its forward is
    done. Other devices get copies.

    Args:
        storage: says block size and device.
        chunks: of a plan that `is_decode`.
        tokens: int64 `[3, num_seqs]`: token ids, positions, slots.
        block_tables: int32 `[num_seqs, max_blocks]`, unused entries 0.
    """

    def __init__(
        self,
        storage: KvCacheStorage,
        chunks: Sequence[ScheduledChunk],
        tokens: npt.NDArray[np.int64],
        block_tables: npt.NDArray[np.int32],
    ) -> None:
        self._device = storage.device
        self._block_size = storage.block_size
        self._tokens = tokens
        self._values = memoryview(tokens.reshape(-1).data)  # single numbers are written faster than by numpy
        self._block_tables = block_tables
        self._ends = [chunk.start + 1 for chunk in chunks]
        self._query_start = tuple(range(len(chunks) + 1))
        self._logits_indices = self._placed(np.arange(len(chunks)))
        is_greedy = any(chunk.request.sampling.is_greedy for chunk in chunks)
        asks = is_greedy and storage.device.type == "cpu"
        self._highest = torch.full((len(chunks),), -1, dtype=torch.int64) if asks else None
        self._placed_tables = self._placed(block_tables)
        self._placed_tokens = self._placed(tokens).unbind(0)

    def batch(self) -> ForwardBatch:
        """As it stands now."""
        token_ids, positions, slots = self._placed_tokens
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slots,
            block_tables=self._placed_tables,
            query_start=self._query_start,
            seq_lens=tuple(self._ends),
            logits_indices=self._logits_indices,
            is_decode=True,
            highest=self._highest,
        )

    def move_on(self, chunks: Sequence[ScheduledChunk]) -> bool:
        """Become the batch of `chunks`, decodes of the same requests in the same order.

        Returns:
            False, and it is of no more use, where they do not follow upon the last ones, or do not fit its tables.
        """
        values, ends, num_seqs = self._values, self._ends, len(chunks)
        has_grown = False
        for place, chunk in enumerate(chunks):
            start = chunk.start
            if start != ends[place]:
                return False
            ends[place] = start + 1
            values[place] = chunk.request.token_ids[-1]
            values[num_seqs + place] = start
            if start % self._block_size:
                values[2 * num_seqs + place] += 1
            elif self._enter_block(place, chunk):
                has_grown = True
            else:
                return False
        if self._device.type != "cpu":
            self._placed_tokens = self._placed(self._tokens).unbind(0)
            if has_grown:
                self._placed_tables = self._placed(self._block_tables)
        return True

    def _enter_block(self, place: int, chunk: ScheduledChunk) -> bool:
        index = chunk.start // self._block_size
        if index >= self._block_tables.shape[1]:
            return False
        block_id = chunk.request.holding.table[index]
        self._block_tables[place, index] = block_id
        self._tokens[2, place] = block_id * self._block_size
        return True

    def _placed(self, array: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> torch.Tensor:
        return placed(array, self._device)


def placed(array: npt.NDArray[np.int64] | npt.NDArray[np.int32], device: torch.device) -> torch.Tensor:
    """The array on `device`: its own memory on the CPU, elsewhere a copy that nothing waits for."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)

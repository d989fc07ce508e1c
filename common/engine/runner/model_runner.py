"""One forward: the plan's chunks become a `ForwardBatch` on the device, and logits come back.

Journey row 8. Owns: building the batch. The work of a step depends on the tokens it computes, never on how long the
outputs already are. Does not know: sampling, policy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from common.engine.kv_cache.storage import KvCacheStorage
from common.engine.model.forward import DecoderModel, ForwardBatch
from common.engine.runner.input_batch import InputBatch
from common.engine.step import ScheduledChunk


@dataclass(frozen=True, slots=True, eq=False)
class StepLogits:
    """Logits of one forward, float32 on the device.

    Attributes:
        sampling: `[num_samples, vocab_size]`, in the order of the sampling chunks; behind a chunk's first row one per
            drafted token.
        prompt: `[num_prompt_logits, vocab_size]`, chunk after chunk; row i of a chunk predicts the token after it.
    """

    sampling: torch.Tensor
    prompt: torch.Tensor


class ModelRunner:
    """Runs the model over the paged cache.

    Args:
        model: the decoder.
        storage: the KV cache it reads and writes.
        batch: rows and block tables of the running requests.
    """

    def __init__(self, model: DecoderModel, storage: KvCacheStorage, batch: InputBatch) -> None:
        self._model = model
        self._storage = storage
        self._batch = batch

    def forward(self, chunks: Sequence[ScheduledChunk]) -> StepLogits:
        """Compute the chunks; writes their K and V into the cache. On CUDA it returns before the device is done."""
        batch = self._build(chunks)
        num_samples = sum(chunk.num_samples for chunk in chunks)
        logits = self._model.forward(batch, self._storage.tensor)
        return StepLogits(logits[:num_samples], logits[num_samples:])

    def _build(self, chunks: Sequence[ScheduledChunk]) -> ForwardBatch:
        if all(chunk.num_tokens == 1 and chunk.samples and not chunk.num_prompt_logits for chunk in chunks):
            return self._build_decodes(chunks)
        counts = np.fromiter((chunk.num_tokens for chunk in chunks), dtype=np.int64, count=len(chunks))
        starts = np.fromiter((chunk.start for chunk in chunks), dtype=np.int64, count=len(chunks))
        rows = np.fromiter((self._batch.row(chunk.request) for chunk in chunks), dtype=np.int64, count=len(chunks))
        ends = np.cumsum(counts)
        query_start = ends - counts
        # Position of each token: its chunk's start plus its place in the chunk.
        positions = np.arange(int(ends[-1]), dtype=np.int64) + np.repeat(starts - query_start, counts)
        block_size = self._storage.block_size
        blocks = self._batch.block_tables[np.repeat(rows, counts), positions // block_size]
        slots = blocks.astype(np.int64) * block_size + positions % block_size
        max_blocks = int(self._batch.num_blocks[rows].max())
        return ForwardBatch(
            token_ids=self._to_device(_tokens(chunks, int(ends[-1]))),
            positions=self._to_device(positions),
            slot_mapping=self._to_device(slots),
            block_tables=self._to_device(self._tables(rows, max_blocks)),
            query_start=(0, *ends.tolist()),
            seq_lens=tuple((starts + counts).tolist()),
            logits_indices=self._to_device(_logits_indices(chunks, query_start.tolist(), ends.tolist())),
        )

    def _build_decodes(self, chunks: Sequence[ScheduledChunk]) -> ForwardBatch:
        """What `_build` makes of one token per sequence, in a third of the time: most steps are like this."""
        num_seqs = len(chunks)
        starts = [chunk.start for chunk in chunks]
        rows = np.array([self._batch.row(chunk.request) for chunk in chunks], dtype=np.int64)
        tokens = [chunk.request.token_ids[chunk.start] for chunk in chunks]
        positions = np.array(starts, dtype=np.int64)
        block_indices, offsets = np.divmod(positions, self._storage.block_size)
        slots = self._batch.block_tables[rows, block_indices] * np.int64(self._storage.block_size) + offsets
        return ForwardBatch(
            token_ids=self._to_device(np.array(tokens, dtype=np.int64)),
            positions=self._to_device(positions),
            slot_mapping=self._to_device(slots),
            block_tables=self._to_device(self._tables(rows, max(starts) // self._storage.block_size + 1)),
            query_start=tuple(range(num_seqs + 1)),
            seq_lens=tuple([start + 1 for start in starts]),
            logits_indices=self._to_device(np.arange(num_seqs)),
            is_decode=True,
        )

    def _tables(self, rows: npt.NDArray[np.int64], max_blocks: int) -> npt.NDArray[np.int32]:
        """Block tables of `rows`, cut to the longest: int32 `[len(rows), max_blocks]`, unused entries 0."""
        tables = self._batch.block_tables[rows, :max_blocks]
        used = np.arange(max_blocks, dtype=np.int32) < self._batch.num_blocks[rows, None]
        return np.where(used, tables, np.int32(0))

    def _to_device(self, array: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self._storage.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._storage.device, non_blocking=True)


def _tokens(chunks: Sequence[ScheduledChunk], num_tokens: int) -> npt.NDArray[np.int64]:
    """Token ids of all chunks, drafts included, concatenated."""
    token_ids: list[int] = []
    for chunk in chunks:
        known = chunk.request.token_ids
        if chunk.num_tokens == 1:
            token_ids.append(known[chunk.start])
        else:
            token_ids.extend(known[chunk.start : chunk.start + chunk.num_tokens])
            token_ids.extend(chunk.draft)
    return np.fromiter(token_ids, dtype=np.int64, count=num_tokens)


def _logits_indices(
    chunks: Sequence[ScheduledChunk], begins: Sequence[int], ends: Sequence[int]
) -> npt.NDArray[np.int64]:
    """Rows of the batch whose logits are wanted: the last tokens of each sampling chunk, then prompt positions."""
    indices: list[int] = []
    for chunk, end in zip(chunks, ends, strict=True):
        indices.extend(range(end - chunk.num_samples, end))
    for chunk, begin in zip(chunks, begins, strict=True):
        indices.extend(range(begin, begin + chunk.num_prompt_logits))
    return np.asarray(indices, dtype=np.int64)

"""One forward: the plan's chunks become a `ForwardBatch` on the device, and logits come back.

Journey row 8. Owns: building the batch. The work of a step depends on the tokens it computes, never on how long the
outputs already are. Does not know: sampling, policy.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from common.engine.kv_cache.storage import KvCacheStorage
from common.engine.model.forward import DecoderModel, ForwardBatch
from common.engine.runner.input_batch import InputBatch
from common.engine.runner.kept_decodes import KeptDecodes, placed
from common.engine.step import ScheduledChunk, StepPlan


class StepLogits(msgspec.Struct, frozen=True, eq=False):
    """Logits of one forward, float32 on the device.

    Attributes:
        sampling: `[num_samples, vocab_size]`, in the order of the sampling chunks; behind a chunk's first row one per
            drafted token.
        prompt: `[num_prompt_logits, vocab_size]`, chunk after chunk; row i of a chunk predicts the token after it. None
            for a plain decode.
        highest: of each row of `sampling`, see `ForwardBatch`.
    """

    sampling: torch.Tensor
    prompt: torch.Tensor | None = None
    highest: torch.Tensor | None = None


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
        self._kept: KeptDecodes | None = None

    def build(self, plan: StepPlan, *, is_unchanged: bool) -> ForwardBatch:
        """The batch of the plan's chunks, whose requests have rows.

        Args:
            plan: with chunks.
            is_unchanged: it has the requests of the last plan in the same order, and no row has changed since.
        """
        kept, self._kept = self._kept, None
        if plan.is_decode:
            if not is_unchanged or kept is None or not kept.move_on(plan.chunks):
                kept = self._build_decodes(plan.chunks)
            self._kept = kept
            return kept.batch()
        return self._build_any(plan.chunks)

    def forward(self, batch: ForwardBatch, plan: StepPlan) -> StepLogits:
        """Compute the plan's batch; writes its K and V into the cache. On CUDA it returns before the device is done."""
        logits = self._model.forward(batch, self._storage.tensor)
        if plan.is_decode:
            return StepLogits(logits, highest=batch.highest)
        num_samples = sum(chunk.num_samples for chunk in plan.chunks)
        return StepLogits(logits[:num_samples], logits[num_samples:])

    def _build_any(self, chunks: Sequence[ScheduledChunk]) -> ForwardBatch:
        self._batch.append_blocks(chunk.request for chunk in chunks)
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
            token_ids=self._placed(_tokens(chunks, int(ends[-1]))),
            positions=self._placed(positions),
            slot_mapping=self._placed(slots),
            block_tables=self._placed(self._batch.block_tables[rows, :max_blocks]),
            query_start=(0, *ends.tolist()),
            seq_lens=tuple((starts + counts).tolist()),
            logits_indices=self._placed(_logits_indices(chunks, query_start.tolist(), ends.tolist())),
        )

    def _build_decodes(self, chunks: Sequence[ScheduledChunk]) -> KeptDecodes:
        """What `_build_any` makes of one token per sequence, in a form that can be moved on."""
        block_size = self._storage.block_size
        requests = [chunk.request for chunk in chunks]
        self._batch.append_blocks(requests)
        starts = [chunk.start for chunk in chunks]
        rows = [self._batch.row(request) for request in requests]
        tokens = np.empty((3, len(chunks)), dtype=np.int64)
        tokens[0] = [request.token_ids[start] for request, start in zip(requests, starts, strict=True)]
        tokens[1] = starts
        block_indices, offsets = np.divmod(tokens[1], block_size)
        tokens[2] = self._batch.block_tables[rows, block_indices] * np.int64(block_size) + offsets
        tables = self._batch.block_tables[rows, : max(starts) // block_size + 1]
        return KeptDecodes(self._storage, chunks, tokens, tables)

    def _placed(self, array: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> torch.Tensor:
        return placed(array, self._storage.device)


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

"""Decode steps as recorded CUDA graphs: one launch in place of some hundred that the host makes one by one.

Journey row 8. Owns: which batches replay a graph, their padding, the fixed tensors that graphs read. Everything that is
not a plain decode runs as before. Does not know: what the model computes, sampling, policy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from common.engine.model.forward import ForwardBatch
from common.engine.model.loaded import PlacedDecoder

FEW_SEQUENCES = (1, 2, 4)
SIZE_STEP = 8


class GraphRecorder(Protocol):
    """Records what `run` asks of the device."""

    def record(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Run `run` until it is ready to be recorded, record it, and return what replays it.

        The replay reads and writes the tensors of the recording; its result is overwritten by the next one.
        """
        ...


class CudaRecorder:
    """CUDA graphs that share one memory pool: only one of them runs at a time.

    Args:
        device: where.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """See `GraphRecorder.record`; two runs on a side stream first compile kernels and fill allocators."""
        with torch.cuda.device(self._device):  # the stream that `graph` records on is the current device's
            side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch gives it no types
            current = torch.cuda.current_stream(self._device)
            side.wait_stream(current)
            with torch.cuda.stream(side):
                run()
                run()
            current.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                result = run()

        def replay() -> torch.Tensor:
            """Run what was recorded; the same tensor each time, with new values."""
            graph.replay()
            return result

        return replay


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of sequences that get a graph, ascending; the last one holds `max_num_seqs`."""
    sizes = [size for size in FEW_SEQUENCES if size < max_num_seqs]
    sizes += range(SIZE_STEP, max_num_seqs, SIZE_STEP)
    return (*sizes, max_num_seqs)


@dataclass(frozen=True, slots=True)
class _Graph:
    """One recorded size and the batch it reads."""

    batch: ForwardBatch
    replay: Callable[[], torch.Tensor]


class GraphedDecoder:
    """A decoder (`common.engine.model.forward.DecoderModel`) whose plain decodes replay graphs.

    A batch is padded to the next size with copies of its first row, which compute and write what that row does.

    Args:
        model: computes; its attention must take positions and block tables of `is_recorded` batches from the device.
        recorder: makes graphs.
        kv_cache: the cache all forwards will use; nothing in it may be in use yet.
        sizes: ascending, see `graph_sizes`.
        max_len_tokens: longest sequence.
    """

    def __init__(
        self,
        model: PlacedDecoder,
        recorder: GraphRecorder,
        kv_cache: torch.Tensor,
        sizes: Sequence[int],
        max_len_tokens: int,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._max_len_tokens = max_len_tokens
        # The largest first: the smaller ones fit into the memory it took.
        self._graphs = {size: self._record(size, recorder) for size in sorted(sizes, reverse=True)}
        self._sizes = tuple(sorted(sizes))

    @property
    def device(self) -> torch.device:
        """Where batches and the KV cache must be."""
        return self._model.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the KV cache."""
        return self._model.dtype

    def forward(self, batch: ForwardBatch, kv_cache: torch.Tensor) -> torch.Tensor:
        """See `DecoderModel.forward`."""
        size = self._size_for(batch)
        if size is None or kv_cache is not self._kv_cache:
            return self._model.forward(batch, kv_cache)
        graph = self._graphs[size]
        _load(graph.batch, batch)
        return graph.replay()[: len(batch.seq_lens)].clone()

    def _size_for(self, batch: ForwardBatch) -> int | None:
        """The smallest recorded size that holds a plain decode; None for everything else."""
        if not batch.is_decode or max(batch.seq_lens) > self._max_len_tokens:
            return None
        return next((size for size in self._sizes if size >= len(batch.seq_lens)), None)

    def _record(self, size: int, recorder: GraphRecorder) -> _Graph:
        block_size, device = self._kv_cache.shape[3], self._kv_cache.device
        max_blocks = -(-self._max_len_tokens // block_size)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            """A fixed input of the recording, on the cache's device."""
            return torch.zeros(shape, dtype=dtype, device=device)

        batch = ForwardBatch(
            token_ids=zeros(size),
            positions=zeros(size),
            slot_mapping=zeros(size),
            block_tables=zeros(size, max_blocks, dtype=torch.int32),
            query_start=tuple(range(size + 1)),
            seq_lens=(self._max_len_tokens,) * size,  # work is shared out for the longest
            logits_indices=torch.arange(size, device=device),
            is_decode=True,
            is_recorded=True,
        )
        return _Graph(batch, recorder.record(lambda: self._model.forward(batch, self._kv_cache)))


def _load(fixed: ForwardBatch, batch: ForwardBatch) -> None:
    """Write `batch` into the tensors of `fixed`, its first row also into the rows beyond. Nothing waits."""
    num_seqs, num_blocks = batch.block_tables.shape
    for mine, given in (
        (fixed.token_ids, batch.token_ids),
        (fixed.positions, batch.positions),
        (fixed.slot_mapping, batch.slot_mapping),
        (fixed.block_tables[:, :num_blocks], batch.block_tables),
    ):
        mine[:num_seqs] = given
        mine[num_seqs:] = given[:1]

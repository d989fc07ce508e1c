"""Attention over the paged KV cache by FlashInfer, for CUDA: one plan per step, one kernel per layer.

Owns: a batch in FlashInfer's terms, and when its plan may be made. Steps that are recorded as graphs go to another
attention: a plan reads lengths on the host, which a replay cannot. Does not know: whether FlashInfer works here
(`flashinfer_choice`), layers' weights, schedulers, or where blocks come from.
Source: FlashInfer 0.7.4, `BatchPrefillWithPagedKVCacheWrapper` and "KV-Cache Layout".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from common.engine.model.attention import Attention
from common.engine.model.config import ModelConfig
from common.engine.model.forward import ForwardBatch


class PagedPrefill(Protocol):
    """The part of FlashInfer's wrapper that is used. `causal` sees query rows as the last ones of their sequence."""

    def plan(  # noqa: PLR0913 -- FlashInfer's own signature
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        window_left: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        """Share out the work of one step. Index tensors are int32; on the host, they are read without waiting."""
        ...

    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        """Attend one layer.

        Args:
            q: `[num_tokens, num_heads, head_dim]`; tokens and heads may be strided.
            paged_kv_cache: `[num_pages, 2, page_size, num_kv_heads, head_dim]`; all but the last may be strided.
            out: like `q`, contiguous.
        """
        ...


class CopyFence(Protocol):
    """Guards the one pinned buffer from which `plan` copies to the device without waiting."""

    def wait(self) -> None:
        """Until the copies before the last `mark` are done."""
        ...

    def mark(self) -> None:
        """Everything asked of the device so far counts."""
        ...


class CudaFence:
    """An event on the device's current stream.

    It fires before the planned step computes, so the host may still be a step ahead.

    Args:
        device: where.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch gives it no types

    def wait(self) -> None:
        """See `CopyFence.wait`."""
        self._copied.synchronize()

    def mark(self) -> None:
        """See `CopyFence.mark`."""
        self._copied.record(torch.cuda.current_stream(self._device))


@dataclass(frozen=True, slots=True)
class PageTable:
    """A batch in FlashInfer's terms, all int32.

    Attributes:
        query_starts: host `[num_seqs + 1]`; sequence i computes tokens `query_starts[i]` to `query_starts[i + 1]`.
        page_starts: host `[num_seqs + 1]`; its cache is `pages[page_starts[i]:page_starts[i + 1]]`.
        last_page_len: host `[num_seqs]`; tokens in its last page, 1 to the page size.
        pages: device `[page_starts[-1]]`.
    """

    query_starts: torch.Tensor
    page_starts: torch.Tensor
    last_page_len: torch.Tensor
    pages: torch.Tensor


def page_table(batch: ForwardBatch, block_size: int) -> PageTable:
    """Made on the host but for the look-up in `batch.block_tables`. Nothing waits for the device."""
    lengths = torch.tensor(batch.seq_lens, dtype=torch.int32)
    num_pages = (lengths + block_size - 1) // block_size
    used = torch.arange(batch.block_tables.shape[1]) < num_pages[:, None]
    places = used.flatten().nonzero().flatten()
    device = batch.block_tables.device
    if device.type == "cuda":
        places = places.pin_memory().to(device, non_blocking=True)
    return PageTable(
        query_starts=torch.tensor(batch.query_start, dtype=torch.int32),
        page_starts=_starts(num_pages.tolist()),
        last_page_len=lengths - (num_pages - 1) * block_size,
        pages=batch.block_tables.flatten()[places],
    )


def _starts(counts: Sequence[int]) -> torch.Tensor:
    """0 and the running sums: int32 `[len(counts) + 1]`."""
    return torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32)


@dataclass(frozen=True, slots=True)
class _Writes:
    """Where one step's K and V go: int64 `[num_tokens]` each."""

    blocks: torch.Tensor
    offsets: torch.Tensor


class FlashInferAttention:
    """`common.engine.model.attention.Attention` for float16 and bfloat16.

    Args:
        config: the model's shape.
        wrapper: computes; nobody else may plan with it.
        fence: guards its pinned buffer.
        recorded: attends batches that are recorded as graphs.
    """

    def __init__(self, config: ModelConfig, wrapper: PagedPrefill, fence: CopyFence, recorded: Attention) -> None:
        self._config = config
        self._wrapper = wrapper
        self._fence = fence
        self._recorded = recorded
        self._planned: tuple[ForwardBatch, _Writes] | None = None

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        batch: ForwardBatch,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor:
        """See `Attention.attend`. The cache is read where it lies: a layer of it is a strided view."""
        if batch.is_recorded:
            return self._recorded.attend(query, key, value, layer, batch, kv_cache)
        with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]  # torch gives it no types
            writes = self._plan(query, batch, kv_cache)
            kv_cache[writes.blocks, layer, 0, writes.offsets] = key
            kv_cache[writes.blocks, layer, 1, writes.offsets] = value
            out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
            self._wrapper.run(query, kv_cache[:, layer], out=out)
        return out.flatten(1)

    def _plan(self, query: torch.Tensor, batch: ForwardBatch, kv_cache: torch.Tensor) -> _Writes:
        """Where `batch` writes; planned at its first layer, and the plan stands until another batch comes."""
        if self._planned is None or self._planned[0] is not batch:
            self._planned = None  # a plan that fails leaves none behind
            config, block_size = self._config, kv_cache.shape[3]
            table = page_table(batch, block_size)
            self._fence.wait()
            self._wrapper.plan(
                table.query_starts,
                table.page_starts,
                table.pages,
                table.last_page_len,
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                block_size,
                causal=True,
                sm_scale=config.head_dim**-0.5,
                # FlashInfer counts what lies left of the token, we count the token itself, too.
                window_left=-1 if config.sliding_window is None else config.sliding_window - 1,
                q_data_type=query.dtype,
                kv_data_type=kv_cache.dtype,
            )
            self._fence.mark()
            self._planned = (batch, _Writes(batch.slot_mapping // block_size, batch.slot_mapping % block_size))
        return self._planned[1]

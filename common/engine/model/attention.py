"""Attention over the paged KV cache, behind one interface; here in plain torch for any device.

Owns: writing a step's K and V into the cache and attending to what each sequence has there. Does not know layers'
weights, schedulers, or where blocks come from.

    kv_cache [num_blocks, num_layers, 2 (K, V), block_size, num_kv_heads, head_dim]
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 -- torch's own name for it

from common.engine.model.config import ModelConfig
from common.engine.model.forward import ForwardBatch


class Attention(Protocol):
    """Causal attention of one step's tokens, layer by layer, by one thread at a time."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        batch: ForwardBatch,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor:
        """Write `key` and `value` to the batch's slots of `layer`, then attend to everything up to each token.

        Args:
            query: `[num_tokens, num_heads, head_dim]`, rotated; may be a strided view.
            key: `[num_tokens, num_kv_heads, head_dim]`, rotated; may be a strided view.
            value: like `key`, not rotated.
            layer: index of the layer.
            batch: the step; the same object for every layer of one forward.
            kv_cache: changed in place.

        Returns:
            `[num_tokens, num_heads * head_dim]` in query's dtype.
        """
        ...


@dataclass(frozen=True, slots=True)
class _DecodeRows:
    """The sequences of a batch that compute one token: one padded attention for all of them.

    rows: int64 [n], their token's index in the batch; blocks: int64 [n, max_blocks];
    mask: [n, 1, 1, max_blocks * block_size], 0 where the token may look, -inf elsewhere.
    """

    rows: torch.Tensor
    blocks: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A sequence that computes several tokens: `[start, end)` of the batch, the last of `length` in its sequence.

    blocks: int64 [num_blocks]; mask: [end - start, length] additive, or None when the chunk is the whole sequence.
    """

    start: int
    end: int
    length: int
    blocks: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Plan:
    """How one batch is attended; the same for all layers."""

    write_blocks: torch.Tensor
    write_offsets: torch.Tensor
    decode: _DecodeRows | None
    chunks: tuple[_Chunk, ...]


class TorchPagedAttention:
    """Attention by gather and `scaled_dot_product_attention`.

    Decode rows are attended together (padded to the longest), chunks of prompts one sequence at a time.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._scale = config.head_dim**-0.5
        self._planned: tuple[ForwardBatch, _Plan] | None = None

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        batch: ForwardBatch,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor:
        """See `Attention.attend`."""
        plan = self._plan(batch, kv_cache)
        keys, values = kv_cache[:, layer, 0], kv_cache[:, layer, 1]
        keys[plan.write_blocks, plan.write_offsets] = key
        values[plan.write_blocks, plan.write_offsets] = value
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        if plan.decode is not None:
            out[plan.decode.rows] = self._attend_decode(query, keys, values, plan.decode)
        for chunk in plan.chunks:
            out[chunk.start : chunk.end] = self._attend_chunk(query[chunk.start : chunk.end], keys, values, chunk)
        return out.flatten(1)

    def _attend_decode(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, decode: _DecodeRows
    ) -> torch.Tensor:
        """`[n, num_heads, head_dim]` for `n` single tokens; the heads of a KV group act as its query positions."""
        num_rows, kv_heads, head_dim = decode.blocks.shape[0], self._config.num_kv_heads, self._config.head_dim
        grouped = query[decode.rows].view(num_rows, kv_heads, -1, head_dim)
        out = F.scaled_dot_product_attention(
            grouped,
            keys[decode.blocks].flatten(1, 2).transpose(1, 2),
            values[decode.blocks].flatten(1, 2).transpose(1, 2),
            attn_mask=decode.mask,
            scale=self._scale,
        )
        return out.reshape(num_rows, -1, head_dim)

    def _attend_chunk(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, chunk: _Chunk
    ) -> torch.Tensor:
        """`[end - start, num_heads, head_dim]` for one sequence's chunk."""
        seen_keys = keys[chunk.blocks].flatten(0, 1)[: chunk.length]
        seen_values = values[chunk.blocks].flatten(0, 1)[: chunk.length]
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            seen_keys.transpose(0, 1)[None],
            seen_values.transpose(0, 1)[None],
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=self._scale,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)

    def _plan(self, batch: ForwardBatch, kv_cache: torch.Tensor) -> _Plan:
        """The plan of `batch`, made at its first layer and kept until another batch comes."""
        if self._planned is None or self._planned[0] is not batch:
            self._planned = (batch, _make_plan(batch, kv_cache, self._config.sliding_window))
        return self._planned[1]


def _make_plan(batch: ForwardBatch, kv_cache: torch.Tensor, window: int | None) -> _Plan:
    block_size = kv_cache.shape[3]
    block_tables = batch.block_tables.to(torch.int64)
    decode: list[int] = []
    chunks: list[_Chunk] = []
    for sequence, length in enumerate(batch.seq_lens):
        start, end = batch.query_start[sequence], batch.query_start[sequence + 1]
        if end - start == 1:
            decode.append(sequence)
        elif end > start:
            blocks = block_tables[sequence, : -(-length // block_size)]
            mask = _chunk_mask(end - start, length, window, kv_cache)
            chunks.append(_Chunk(start, end, length, blocks, mask))
    return _Plan(
        write_blocks=batch.slot_mapping // block_size,
        write_offsets=batch.slot_mapping % block_size,
        decode=_decode_rows(batch, block_tables, decode, window, kv_cache) if decode else None,
        chunks=tuple(chunks),
    )


def _decode_rows(
    batch: ForwardBatch, block_tables: torch.Tensor, sequences: list[int], window: int | None, kv_cache: torch.Tensor
) -> _DecodeRows:
    device, block_size = kv_cache.device, kv_cache.shape[3]
    lengths = [batch.seq_lens[sequence] for sequence in sequences]
    num_blocks = -(-max(lengths) // block_size)
    rows = torch.tensor([batch.query_start[sequence] for sequence in sequences], device=device)
    ends = torch.tensor(lengths, device=device)[:, None]
    columns = torch.arange(num_blocks * block_size, device=device)[None, :]
    hidden = columns >= ends
    if window is not None:
        hidden |= columns < ends - window
    mask = torch.zeros(hidden.shape, dtype=kv_cache.dtype, device=device).masked_fill_(hidden, float("-inf"))
    blocks = block_tables[torch.tensor(sequences, device=device), :num_blocks]
    return _DecodeRows(rows, blocks, mask[:, None, None, :])


def _chunk_mask(num_queries: int, length: int, window: int | None, kv_cache: torch.Tensor) -> torch.Tensor | None:
    """Additive causal mask of the last `num_queries` of `length` tokens; None where plain causal masking will do."""
    if num_queries == length and (window is None or length <= window):
        return None
    device = kv_cache.device
    positions = torch.arange(length - num_queries, length, device=device)[:, None]
    columns = torch.arange(length, device=device)[None, :]
    hidden = columns > positions
    if window is not None:
        hidden |= columns <= positions - window
    mask = torch.zeros(hidden.shape, dtype=kv_cache.dtype, device=device)
    return mask.masked_fill_(hidden, float("-inf"))

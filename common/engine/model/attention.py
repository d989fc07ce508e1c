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

LONGEST_SHORT_TOKENS = 8
"""Sequences that compute at most so many tokens are attended together."""


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
class _ShortRows:
    """The sequences of a batch that compute the same small number of tokens: one padded attention for all of them.

    Usually decode (one token); several when drafted tokens are verified. With `b` sequences of `q` tokens:
    rows: int64 [b, q], the tokens' indices in the batch; blocks: int64 [b, max_blocks];
    mask: [b, 1, group * q, max_blocks * block_size], 0 where a token may look, -inf elsewhere.
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
    short: tuple[_ShortRows, ...]
    chunks: tuple[_Chunk, ...]


class TorchPagedAttention:
    """Attention by gather and `scaled_dot_product_attention`.

    Decode rows are attended together (padded to the longest), chunks of prompts one sequence at a time. Slots that were
    never written must hold finite numbers: padding reads them with weight 0.
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
        for short in plan.short:
            out[short.rows] = self._attend_short(query, keys, values, short)
        for chunk in plan.chunks:
            out[chunk.start : chunk.end] = self._attend_chunk(query[chunk.start : chunk.end], keys, values, chunk)
        return out.flatten(1)

    def _attend_short(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, short: _ShortRows
    ) -> torch.Tensor:
        """`[b, q, num_heads, head_dim]`; the query heads of a KV head lie beside its tokens as more query positions."""
        num_sequences, num_queries = short.rows.shape
        kv_heads, head_dim = self._config.num_kv_heads, self._config.head_dim
        grouped = query[short.rows].view(num_sequences, num_queries, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
        out = F.scaled_dot_product_attention(
            grouped.flatten(2, 3),
            keys[short.blocks].flatten(1, 2).transpose(1, 2),
            values[short.blocks].flatten(1, 2).transpose(1, 2),
            attn_mask=short.mask,
            scale=self._scale,
        )
        by_token = out.view(num_sequences, kv_heads, -1, num_queries, head_dim).permute(0, 3, 1, 2, 4)
        return by_token.flatten(2, 3)

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
            self._planned = (batch, _make_plan(batch, kv_cache, self._config))
        return self._planned[1]


def _make_plan(batch: ForwardBatch, kv_cache: torch.Tensor, config: ModelConfig) -> _Plan:
    block_size = kv_cache.shape[3]
    block_tables = batch.block_tables.to(torch.int64)
    short: dict[int, list[int]] = {}
    chunks: list[_Chunk] = []
    for sequence, length in enumerate(batch.seq_lens):
        start, end = batch.query_start[sequence], batch.query_start[sequence + 1]
        if end - start > LONGEST_SHORT_TOKENS:
            blocks = block_tables[sequence, : -(-length // block_size)]
            mask = _chunk_mask(end - start, length, config.sliding_window, kv_cache)
            chunks.append(_Chunk(start, end, length, blocks, mask))
        elif end > start:
            short.setdefault(end - start, []).append(sequence)
    return _Plan(
        write_blocks=batch.slot_mapping // block_size,
        write_offsets=batch.slot_mapping % block_size,
        short=tuple(
            _short_rows(batch, block_tables, sequences, num_queries, kv_cache, config)
            for num_queries, sequences in short.items()
        ),
        chunks=tuple(chunks),
    )


def _short_rows(
    batch: ForwardBatch,
    block_tables: torch.Tensor,
    sequences: list[int],
    num_queries: int,
    kv_cache: torch.Tensor,
    config: ModelConfig,
) -> _ShortRows:
    device, block_size = kv_cache.device, kv_cache.shape[3]
    lengths = [batch.seq_lens[sequence] for sequence in sequences]
    num_blocks = -(-max(lengths) // block_size)
    tokens = torch.arange(num_queries, device=device)
    rows = torch.tensor([batch.query_start[sequence] for sequence in sequences], device=device)[:, None] + tokens
    positions = torch.tensor(lengths, device=device)[:, None, None] - num_queries + tokens[:, None]
    columns = torch.arange(num_blocks * block_size, device=device)
    mask = _additive_mask(positions, columns, config.sliding_window, kv_cache.dtype)
    blocks = block_tables[torch.tensor(sequences, device=device), :num_blocks]
    return _ShortRows(rows, blocks, mask.repeat(1, config.num_heads // config.num_kv_heads, 1)[:, None])


def _chunk_mask(num_queries: int, length: int, window: int | None, kv_cache: torch.Tensor) -> torch.Tensor | None:
    """Additive causal mask of the last `num_queries` of `length` tokens; None where plain causal masking will do."""
    if num_queries == length and (window is None or length <= window):
        return None
    positions = torch.arange(length - num_queries, length, device=kv_cache.device)[:, None]
    columns = torch.arange(length, device=kv_cache.device)
    return _additive_mask(positions, columns, window, kv_cache.dtype)


def _additive_mask(
    positions: torch.Tensor, columns: torch.Tensor, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """0 where a token may look, -inf elsewhere.

    Args:
        positions: int64 `[..., num_queries, 1]` of the tokens that look.
        columns: int64 `[num_keys]` of what they look at.
        window: how many last tokens a token sees, itself included; None: all.
        dtype: of the result `[..., num_queries, num_keys]`.
    """
    hidden = columns > positions
    if window is not None:
        hidden |= columns <= positions - window
    return torch.zeros(hidden.shape, dtype=dtype, device=columns.device).masked_fill_(hidden, float("-inf"))

"""Attention over the paged KV cache in Triton, for CUDA: no gather of the cache, nothing read back by the host.

Owns: the kernels' launch. A tile is some tokens of one sequence with all query heads of one KV head; long histories are
split over programs and put together after (flash-decoding). Positions come from the device, so a captured graph may
replay with new values. Does not know layers' weights, schedulers, or where blocks come from.
Source: Dao 2023 (FlashAttention-2), Dao et al. 2023 (Flash-Decoding), Kwon et al. 2023 (PagedAttention).
"""

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped]  # it ships no types

from common.engine.model.config import ModelConfig
from common.engine.model.forward import ForwardBatch
from common.engine.model.triton_kernels import combine_splits, paged_attention

ROWS_SHORT = 16
ROWS_LONG = 64
KEYS_PER_STEP = 32
KEYS_PER_SPLIT = 512
MAX_SPLITS = 16


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Tiles of one height. `table`: int32 [num_tiles, 3] of (first token row, number of tokens, sequence)."""

    table: torch.Tensor
    rows: int
    num_splits: int


@dataclass(frozen=True, slots=True)
class _Plan:
    """How one forward attends; the same for all its layers."""

    write_blocks: torch.Tensor
    write_offsets: torch.Tensor
    tiles: tuple[_Tiles, ...]


class TritonPagedAttention:
    """`common.engine.model.attention.Attention` for CUDA tensors."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._group = config.num_heads // config.num_kv_heads
        self._planned: tuple[ForwardBatch, _Plan] | None = None
        self._decode_tables: dict[int, torch.Tensor] = {}

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        batch: ForwardBatch,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor:
        """See `Attention.attend`; the heads of `query` must lie next to each other."""
        plan = self._plan(batch, kv_cache.shape[3], is_first=layer == 0)
        kv_cache[plan.write_blocks, layer, 0, plan.write_offsets] = key
        kv_cache[plan.write_blocks, layer, 1, plan.write_offsets] = value
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        # Triton launches on the current device, wherever its arguments are.
        with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]  # torch gives it no types
            for tiles in plan.tiles:
                self._launch(query, layer, batch, kv_cache, tiles, out)
        return out.flatten(1)

    def _launch(
        self,
        query: torch.Tensor,
        layer: int,
        batch: ForwardBatch,
        kv_cache: torch.Tensor,
        tiles: _Tiles,
        out: torch.Tensor,
    ) -> None:
        """Both kernels over one kind of tiles; rows of `out` that are in none of them stay."""
        config, num_tokens = self._config, query.shape[0]
        partial_shape = (tiles.num_splits, num_tokens, config.num_heads)
        partial = torch.empty((*partial_shape, config.head_dim), dtype=torch.float32, device=query.device)
        log_sums = torch.empty(partial_shape, dtype=torch.float32, device=query.device)
        addresses = (query, kv_cache, tiles.table, batch.positions, batch.block_tables, partial, log_sums)
        sizes = (num_tokens, layer, query.stride(0), kv_cache.stride(0), batch.block_tables.stride(0))
        constants = {
            "NUM_HEADS": config.num_heads,
            "HEAD_DIM": config.head_dim,
            "PADDED_HEAD_DIM": max(16, triton.next_power_of_2(config.head_dim)),
            "NUM_SPLITS": tiles.num_splits,
        }
        paged_attention[(len(tiles.table), config.num_kv_heads, tiles.num_splits)](
            *addresses,
            *sizes,
            NUM_KV_HEADS=config.num_kv_heads,
            BLOCK_SIZE=kv_cache.shape[3],
            WINDOW=config.sliding_window or 0,
            ROWS=tiles.rows,
            KEYS=KEYS_PER_STEP,
            **constants,
        )
        tokens = triton.next_power_of_2(max(1, tiles.rows // self._group))
        combine_splits[(len(tiles.table), config.num_heads)](
            partial, log_sums, tiles.table, out, num_tokens, TOKENS=tokens, **constants
        )

    def _plan(self, batch: ForwardBatch, block_size: int, *, is_first: bool) -> _Plan:
        """The plan of `batch`, made at its first layer and kept until the next forward.

        A recorded graph holds that layer, too: where K and V go is computed anew in each replay.
        """
        if is_first or self._planned is None or self._planned[0] is not batch:
            tiles = self._decode_tiles(batch) if batch.is_decode else _tiles_of(batch, self._group)
            self._planned = (batch, _Plan(batch.slot_mapping // block_size, batch.slot_mapping % block_size, tiles))
        return self._planned[1]

    def _decode_tiles(self, batch: ForwardBatch) -> tuple[_Tiles, ...]:
        """What `_tiles_of` gives for one token per sequence. Tables stay, as recorded graphs read them."""
        num_seqs = len(batch.seq_lens)
        table = self._decode_tables.get(num_seqs)
        if table is None:
            table = _table([(row, 1, row) for row in range(num_seqs)], batch.positions.device)
            self._decode_tables[num_seqs] = table
        return (_Tiles(table, _rows_short(self._group), _num_splits(max(batch.seq_lens))),)


def _rows_short(group: int) -> int:
    return max(ROWS_SHORT, int(triton.next_power_of_2(group)))


def _num_splits(longest: int) -> int:
    return min(MAX_SPLITS, int(triton.next_power_of_2(-(-longest // KEYS_PER_SPLIT))))


def _table(tiles: list[tuple[int, int, int]], device: torch.device) -> torch.Tensor:
    return torch.tensor(tiles, dtype=torch.int32, device=device)


def _tiles_of(batch: ForwardBatch, group: int) -> tuple[_Tiles, ...]:
    """Sequences with few tokens get low tiles, split along their history; chunks of prompts get high ones, unsplit."""
    rows_short, rows_long = _rows_short(group), max(ROWS_LONG, int(triton.next_power_of_2(group)))
    short: list[tuple[int, int, int]] = []
    long: list[tuple[int, int, int]] = []
    longest = 1
    for sequence, length in enumerate(batch.seq_lens):
        start, end = batch.query_start[sequence], batch.query_start[sequence + 1]
        if (end - start) * group <= rows_short:
            longest = max(longest, length)
            short.append((start, end - start, sequence))
            continue
        step = rows_long // group
        long.extend((first, min(step, end - first), sequence) for first in range(start, end, step))
    device = batch.positions.device
    return tuple(
        _Tiles(_table(table, device), rows, splits)
        for table, rows, splits in ((short, rows_short, _num_splits(longest)), (long, rows_long, 1))
        if table
    )

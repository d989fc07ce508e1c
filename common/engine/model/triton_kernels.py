"""The device code of `triton_attention`. Under TRITON_INTERPRET=1 (read when Triton is imported) it runs on the CPU.

Owns: two kernels and their parts. Numbers are float32 inside; matrix products in the tensors' own precision (no TF32).
"""

# ruff: noqa: N803, N806, PLR0913 -- Triton's convention: constants are capitals, and a kernel takes flat arguments
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,misc"
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens", "layer", "table_stride"])
def paged_attention(
    query,
    kv_cache,
    tiles,
    positions,
    block_tables,
    partial,
    log_sums,
    num_tokens,
    layer,
    query_stride,
    block_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """One tile, one KV head, one part of the history: normalised output and log of the sum of exponentials.

    Row `r` of a tile is token `r // group` and query head `kv_head * group + r % group`.
    partial: float32 [NUM_SPLITS, num_tokens, NUM_HEADS, HEAD_DIM]; log_sums: the same without HEAD_DIM, -inf where a
    part of the history holds nothing the row may see.
    """
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_token, num_tile_tokens = tl.load(tiles + tile * 3), tl.load(tiles + tile * 3 + 1)
    table = block_tables + tl.load(tiles + tile * 3 + 2) * table_stride
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    row, dim = tl.arange(0, ROWS), tl.arange(0, PADDED_HEAD_DIM)
    token, head, exists = first_token + row // GROUP, kv_head * GROUP + row % GROUP, row < num_tile_tokens * GROUP
    both = exists[:, None] & (dim < HEAD_DIM)[None, :]
    position = tl.load(positions + token, mask=exists, other=0).to(tl.int32)
    q = tl.load(query + token[:, None] * query_stride + head[:, None] * HEAD_DIM + dim[None, :], mask=both, other=0.0)
    begin, end = _history(positions + first_token, num_tile_tokens, split, WINDOW, KEYS, NUM_SPLITS)
    keys = kv_cache + layer.to(tl.int64) * 2 * BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM + kv_head * HEAD_DIM
    acc, log_sum = _attend(
        q, position, keys, table, begin, end, block_stride, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, KEYS
    )
    out_row = ((split * num_tokens + token) * NUM_HEADS + head).to(tl.int64)
    tl.store(log_sums + out_row, log_sum, mask=exists)
    tl.store(partial + out_row[:, None] * HEAD_DIM + dim[None, :], acc, mask=both)


@triton.jit
def _history(positions, num_tile_tokens, split, WINDOW: tl.constexpr, KEYS: tl.constexpr, NUM_SPLITS: tl.constexpr):
    """The keys `[begin, end)` of one split: those the tile may see, in steps of KEYS, shared out evenly."""
    last = tl.load(positions + num_tile_tokens - 1).to(tl.int32)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(0, tl.load(positions).to(tl.int32) - WINDOW + 1) // KEYS * KEYS
    steps_per_split = tl.cdiv(tl.cdiv(last + 1 - first, KEYS), NUM_SPLITS)
    begin = first + split * steps_per_split * KEYS
    return begin, tl.minimum(last + 1, begin + steps_per_split * KEYS)


@triton.jit
def _attend(
    q,
    position,
    keys,
    table,
    begin,
    end,
    block_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Online softmax over keys `[begin, end)`: output [rows, padded head_dim], log of the sum [rows]."""
    dim = tl.arange(0, q.shape[1])
    highest = tl.full([q.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    acc = tl.zeros([q.shape[0], q.shape[1]], tl.float32)
    for start in range(begin, end, KEYS):
        column = start + tl.arange(0, KEYS)
        block = tl.load(table + column // BLOCK_SIZE, mask=column < end, other=0).to(tl.int64)
        place = block * block_stride + (column % BLOCK_SIZE) * (NUM_KV_HEADS * HEAD_DIM)
        exists = (column < end)[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(keys + place[:, None] + dim[None, :], mask=exists, other=0.0)
        v = tl.load(keys + BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM + place[:, None] + dim[None, :], mask=exists, other=0.0)
        seen = (column < end)[None, :] & (column[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (column[None, :] > position[:, None] - WINDOW)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (HEAD_DIM**-0.5)
        scores = tl.where(seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        # A row that has seen nothing yet stays at -inf; 0 in its place avoids inf - inf.
        anchor = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp(scores - anchor[:, None])
        shrink = tl.exp(highest - anchor)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        highest = new_highest
    divisor = tl.where(total > 0, total, 1.0)
    return acc / divisor[:, None], tl.where(total > 0, highest + tl.log(divisor), float("-inf"))


@triton.jit(do_not_specialize=["num_tokens"])
def combine_splits(
    partial,
    log_sums,
    tiles,
    out,
    num_tokens,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """Weigh the parts of one tile and head by their share of the softmax. out: [num_tokens, NUM_HEADS, HEAD_DIM]."""
    tile, head = tl.program_id(0), tl.program_id(1)
    index, dim = tl.arange(0, TOKENS), tl.arange(0, PADDED_HEAD_DIM)
    exists = index < tl.load(tiles + tile * 3 + 1)
    both = exists[:, None] & (dim < HEAD_DIM)[None, :]
    out_row = ((tl.load(tiles + tile * 3) + index) * NUM_HEADS + head).to(tl.int64)

    highest = tl.full([TOKENS], float("-inf"), tl.float32)
    for split in range(NUM_SPLITS):
        row = out_row + split * num_tokens * NUM_HEADS
        highest = tl.maximum(highest, tl.load(log_sums + row, mask=exists, other=0.0))
    total = tl.zeros([TOKENS], tl.float32)
    acc = tl.zeros([TOKENS, PADDED_HEAD_DIM], tl.float32)
    for split in range(NUM_SPLITS):
        row = out_row + split * num_tokens * NUM_HEADS
        share = tl.exp(tl.load(log_sums + row, mask=exists, other=0.0) - highest)
        acc += tl.load(partial + row[:, None] * HEAD_DIM + dim[None, :], mask=both, other=0.0) * share[:, None]
        total += share
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + out_row[:, None] * HEAD_DIM + dim[None, :], result, mask=both)

"""KV pools of the default model's shape in plain host memory, for processes without an engine."""

import numpy as np
from numpy.typing import NDArray

from common.wire.kv_layout import KvLayout
from kv_transfer.compatibility import Fingerprint

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, ELEMENT_BYTES = 30, 3, 64, 4
FINGERPRINT = Fingerprint(
    model="benchmark",
    dtype="float32",
    num_layers=NUM_LAYERS,
    num_kv_heads=NUM_KV_HEADS,
    head_dim=HEAD_DIM,
    tokenizer="none",
)


def a_pool(num_blocks: int, block_size: int, seed: int | None) -> NDArray[np.uint8]:
    """`[num_blocks, block_bytes]` uint8, every page touched: random bytes, or zeros without a seed."""
    block_bytes = NUM_LAYERS * 2 * block_size * NUM_KV_HEADS * HEAD_DIM * ELEMENT_BYTES
    if seed is None:
        pool = np.empty((num_blocks, block_bytes), dtype=np.uint8)
        pool.fill(0)
        return pool
    one = np.random.default_rng(seed).integers(0, 256, block_bytes, dtype=np.uint8)
    # Blocks are rotations of one another: cheap to make, and no two are alike.
    return np.stack([np.roll(one, 131 * i) for i in range(num_blocks)])


def a_layout(pool: NDArray[np.uint8], block_size: int) -> KvLayout:
    """Where that pool lies."""
    return KvLayout(
        base_address=pool.ctypes.data,
        num_blocks=pool.shape[0],
        num_layers=NUM_LAYERS,
        block_size=block_size,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        dtype="float32",
        element_bytes=ELEMENT_BYTES,
        device="cpu",
    )

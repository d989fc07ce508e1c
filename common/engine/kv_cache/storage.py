"""The bytes of the KV cache: one page-aligned tensor on the device, block-major, on large pages where there are such.

Journey rows 4, 7, 8. Owns: the allocation, its layout for readers in other processes, copies of whole blocks.
Does not know: which block belongs to whom.
"""

import contextlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.config.engine import EngineConfig
from common.engine.kv_cache.manager import BlockCopy
from common.errors import StartupError
from common.wire.kv_layout import KvLayout

PAGE_BYTES = 4096
LARGE_PAGE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """What a model and a config say about one block: `[num_layers, 2, block_size, num_kv_heads, head_dim]`."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """One whole block, every layer, K and V."""
        num_elements = self.num_layers * 2 * self.block_size * self.num_kv_heads * self.head_dim
        return num_elements * self.dtype.itemsize


def resolve_num_blocks(config: EngineConfig, shape: KvShape) -> int:
    """Blocks of the pool: as configured, or as many as fit into `kv_cache_bytes`.

    Raises:
        StartupError: not even one block fits.
    """
    num_blocks = config.num_kv_blocks or config.kv_cache_bytes // shape.block_bytes
    if num_blocks < 1:
        raise StartupError(
            f"kv_cache_bytes is {config.kv_cache_bytes}, one block of {config.block_size} tokens needs "
            f"{shape.block_bytes}"
        )
    return num_blocks


class KvCacheStorage:
    """The KV cache of one engine.

    Attributes:
        tensor: `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`, starts on a page border. Zeroed, so
            that slots nobody wrote hold numbers and a masked position can never turn a sum into NaN.
        shape: one block.

    Args:
        num_blocks: size of the pool.
        shape: one block.
        device: where it lies.

    Raises:
        StartupError: the device has too little memory.
    """

    def __init__(self, num_blocks: int, shape: KvShape, device: torch.device) -> None:
        self.shape = shape
        total_bytes = num_blocks * shape.block_bytes
        page_bytes = LARGE_PAGE_BYTES if device.type == "cpu" else PAGE_BYTES
        try:
            raw = _zeros(total_bytes + page_bytes, device)
        except (RuntimeError, MemoryError, OSError, OverflowError) as error:  # torch's "no memory" is a RuntimeError
            raise StartupError(f"no memory for a KV cache of {total_bytes} bytes on {device}: {error}") from error
        start = -raw.data_ptr() % page_bytes
        block = (shape.num_layers, 2, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self.tensor = raw[start : start + total_bytes].view(shape.dtype).view(num_blocks, *block)

    @classmethod
    def allocate(cls, config: EngineConfig, shape: KvShape, device: torch.device) -> "KvCacheStorage":
        """The cache that `config` asks for. Raises `StartupError` as the constructor does."""
        return cls(resolve_num_blocks(config, shape), shape, device)

    @property
    def num_blocks(self) -> int:
        """Size of the pool."""
        return self.tensor.shape[0]

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.shape.block_size

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.tensor.device

    def layout(self) -> KvLayout:
        """What a reader needs to turn block ids into addresses."""
        return KvLayout(
            base_address=self.tensor.data_ptr(),
            num_blocks=self.num_blocks,
            num_layers=self.shape.num_layers,
            block_size=self.shape.block_size,
            num_kv_heads=self.shape.num_kv_heads,
            head_dim=self.shape.head_dim,
            dtype=str(self.shape.dtype).removeprefix("torch."),
            element_bytes=self.shape.dtype.itemsize,
            device=self.device.type,
            device_index=self.device.index or 0,
        )

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks in order; changes `tensor` in place."""
        for copy in copies:
            self.tensor[copy.target].copy_(self.tensor[copy.source])

    def take_memory(self) -> None:
        """Write every page once. The content is lost: before the first request only.

        The first write to a page takes it from the system and wipes it: without this, a pull into blocks that were
        never used took 61 ms instead of 5 (512 tokens of SmolLM2-135M in float32).
        """
        self.tensor.zero_()

    def finish_pending_work(self) -> None:
        """Wait until the device has done everything asked of it, so that others may write into freed blocks."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def _zeros(num_bytes: int, device: torch.device) -> torch.Tensor:
    """`num_bytes` zero bytes; memory of the host is taken page by page as it is written, and freed with the tensor.

    Blocks of a sequence lie scattered over the cache: on pages of 4 KB, attention waits for the TLB.

    Raises:
        RuntimeError, MemoryError, OSError, OverflowError: there is too little.
    """
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # a system without large pages keeps the usual ones
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)

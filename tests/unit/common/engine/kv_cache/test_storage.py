import gc
from pathlib import Path

import pytest
import torch

from common.config.engine import EngineConfig
from common.engine.kv_cache.manager import BlockCopy
from common.engine.kv_cache.storage import LARGE_PAGE_BYTES, PAGE_BYTES, KvCacheStorage, KvShape, resolve_num_blocks
from common.errors import StartupError
from common.ids import BlockId

SHAPE = KvShape(num_layers=3, block_size=4, num_kv_heads=2, head_dim=8, dtype=torch.float16)
CPU = torch.device("cpu")


def test_the_cache_starts_on_a_page_and_its_layout_says_where_everything_is() -> None:
    storage = KvCacheStorage(5, SHAPE, CPU)
    layout = storage.layout()
    assert tuple(storage.tensor.shape) == (5, 3, 2, 4, 2, 8)
    assert layout.base_address == storage.tensor.data_ptr()
    assert layout.base_address % PAGE_BYTES == 0
    assert layout.block_bytes == SHAPE.block_bytes == storage.tensor[0].nbytes
    assert storage.tensor[3].data_ptr() == layout.base_address + 3 * layout.block_bytes
    assert (layout.dtype, layout.element_bytes, layout.device, layout.num_blocks) == ("float16", 2, "cpu", 5)


def test_slots_nobody_wrote_hold_numbers() -> None:
    assert not KvCacheStorage(5, SHAPE, CPU).tensor.any()


def test_memory_that_was_taken_is_there_before_the_first_block_is_written() -> None:
    storage = KvCacheStorage((32 << 20) // SHAPE.block_bytes, SHAPE, CPU)
    before = _resident_bytes()
    storage.take_memory()
    assert _resident_bytes() - before > 24 << 20
    assert not storage.tensor.any()


def test_copying_moves_whole_blocks_in_order() -> None:
    storage = KvCacheStorage(3, SHAPE, CPU)
    storage.tensor[0] = 1.0
    storage.copy_blocks([BlockCopy(BlockId(0), BlockId(1)), BlockCopy(BlockId(1), BlockId(2))])
    assert (storage.tensor == 1.0).all()


def test_the_pool_is_as_large_as_its_memory_unless_blocks_are_named() -> None:
    memory = EngineConfig(model="m", kv_cache_bytes=10 * SHAPE.block_bytes + 1, block_size=4)
    assert resolve_num_blocks(memory, SHAPE) == 10
    assert KvCacheStorage.allocate(EngineConfig(model="m", num_kv_blocks=7, block_size=4), SHAPE, CPU).num_blocks == 7


def test_memory_for_less_than_one_block_is_refused_with_both_numbers() -> None:
    config = EngineConfig(model="m", kv_cache_bytes=100, block_size=4)
    with pytest.raises(StartupError, match=f"100.*{SHAPE.block_bytes}"):
        resolve_num_blocks(config, SHAPE)


def test_a_device_without_enough_memory_is_one_clear_error() -> None:
    with pytest.raises(StartupError, match="no memory"):
        KvCacheStorage(1 << 50, SHAPE, CPU)


def test_a_cache_on_the_host_asks_for_large_pages_and_gives_its_memory_back() -> None:
    shape = KvShape(num_layers=1, block_size=16, num_kv_heads=1, head_dim=LARGE_PAGE_BYTES // 64, dtype=torch.float16)
    storage = KvCacheStorage(7, shape, CPU)
    address = storage.layout().base_address
    assert address % LARGE_PAGE_BYTES == 0
    assert "hg" in _flags_of_mapping(address)  # the kernel's name for "may be on large pages"
    del storage
    gc.collect()
    assert _flags_of_mapping(address) == ()


def _resident_bytes() -> int:
    """Memory that this process really has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def _flags_of_mapping(address: int) -> tuple[str, ...]:
    """What the kernel says about the mapping that holds `address`; nothing when there is none."""
    is_it = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            begin, end = (int(part, 16) for part in words[0].split("-"))
            is_it = begin <= address < end
        elif is_it and words[0] == "VmFlags:":
            return tuple(words[1:])
    return ()

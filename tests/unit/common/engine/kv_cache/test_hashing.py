import subprocess
import sys

from common.engine.kv_cache.hashing import ROOT, BlockHash, extend_hashes, hash_block


def test_a_name_covers_every_earlier_token() -> None:
    first, other = hash_block(ROOT, [1, 2]), hash_block(ROOT, [1, 3])
    assert first != other
    assert hash_block(first, [5, 6]) != hash_block(other, [5, 6])


def test_block_borders_are_part_of_the_name() -> None:
    assert hash_block(hash_block(ROOT, [1]), [2, 3]) != hash_block(hash_block(ROOT, [1, 2]), [3])


def test_names_are_equal_in_every_process() -> None:
    code = "from common.engine.kv_cache.hashing import *; print(hash_block(ROOT, [1, 2, 3]).hex())"
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert printed.stdout.strip() == hash_block(ROOT, [1, 2, 3]).hex()


def test_extending_names_full_blocks_only_and_each_once() -> None:
    hashes: list[BlockHash] = []
    extend_hashes(hashes, [1, 2, 3, 4, 5], 2, 3)
    assert hashes == [hash_block(ROOT, [1, 2])]
    extend_hashes(hashes, [1, 2, 3, 4, 5], 2, 5)
    assert hashes == [hash_block(ROOT, [1, 2]), hash_block(hashes[0], [3, 4])]

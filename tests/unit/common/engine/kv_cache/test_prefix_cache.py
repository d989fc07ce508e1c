import pytest

from common.engine.kv_cache.hashing import ROOT, hash_block
from common.engine.kv_cache.prefix_cache import PrefixCache
from common.errors import Bug
from common.ids import BlockId

A, B = hash_block(ROOT, [1]), hash_block(ROOT, [2])


def test_a_match_ends_at_the_first_unknown_block() -> None:
    cache = PrefixCache()
    cache.enter(A, BlockId(7))
    assert cache.longest_match([A, B]) == [7]
    assert cache.longest_match([B, A]) == []


def test_the_first_holder_of_a_content_stays_the_one_that_is_found() -> None:
    cache = PrefixCache()
    cache.enter(A, BlockId(1))
    cache.enter(A, BlockId(2))
    assert cache.longest_match([A]) == [1]
    assert BlockId(2) not in cache


def test_a_forgotten_block_is_found_no_more() -> None:
    cache = PrefixCache()
    cache.enter(A, BlockId(1))
    cache.forget(BlockId(1))
    cache.forget(BlockId(1))
    assert cache.longest_match([A]) == []
    assert len(cache) == 0


def test_a_contradiction_is_found() -> None:
    cache = PrefixCache()
    cache.enter(A, BlockId(1))
    cache._hash_of[BlockId(1)] = B
    with pytest.raises(Bug):
        cache.check_integrity()

from collections.abc import Sequence

import pytest

from common.engine.kv_cache.manager import Holding, KvCacheManager
from common.errors import Bug
from common.ids import LeaseId, RequestId

BLOCK_SIZE = 4


def admitted(kv: KvCacheManager, name: str, tokens: Sequence[int], *, is_computed: bool = True) -> Holding:
    holding = Holding(RequestId(name))
    kv.admit(holding, len(tokens), kv.find_prefix(holding, tokens))
    if is_computed:
        kv.enter_computed(holding, tokens, len(tokens))
    return holding


def test_only_computed_full_blocks_are_found_again() -> None:
    kv = KvCacheManager(8, BLOCK_SIZE)
    tokens = list(range(10))
    first = admitted(kv, "a", tokens, is_computed=False)
    assert kv.find_prefix(Holding(RequestId("b")), tokens) == []
    kv.enter_computed(first, tokens, 7)
    assert kv.find_prefix(Holding(RequestId("b")), tokens) == first.table.slice(0, 1)
    kv.enter_computed(first, tokens, 10)
    assert kv.find_prefix(Holding(RequestId("b")), tokens) == first.table.slice(0, 2)


def test_a_full_match_still_leaves_the_last_token_to_compute() -> None:
    kv = KvCacheManager(8, BLOCK_SIZE)
    tokens = list(range(8))
    first = admitted(kv, "a", tokens)
    assert kv.find_prefix(Holding(RequestId("b")), tokens) == first.table.slice(0, 1)


def test_content_outlives_its_request_until_the_room_is_needed() -> None:
    kv = KvCacheManager(4, BLOCK_SIZE)
    tokens = list(range(9))
    kv.free(admitted(kv, "a", tokens))
    assert kv.num_in_use == 0
    again = Holding(RequestId("b"))
    prefix = kv.find_prefix(again, tokens)
    assert len(prefix) == 2
    assert kv.num_blocks_to_admit(9, prefix) == 3
    admitted(kv, "c", [50 + i for i in range(13)])
    assert kv.find_prefix(Holding(RequestId("d")), tokens) == []
    kv.check_integrity()


def test_the_tail_of_a_content_is_thrown_away_before_its_head() -> None:
    kv = KvCacheManager(4, BLOCK_SIZE)
    tokens = list(range(17))[:16]
    kv.free(admitted(kv, "a", tokens))
    admitted(kv, "b", [90, 91, 92], is_computed=False)
    assert len(kv.find_prefix(Holding(RequestId("c")), tokens)) == 3


def test_without_a_prefix_cache_nothing_is_shared() -> None:
    kv = KvCacheManager(8, BLOCK_SIZE, enable_prefix_cache=False)
    admitted(kv, "a", range(8))
    assert kv.find_prefix(Holding(RequestId("b")), range(8)) == []


def test_a_fork_shares_full_blocks_and_copies_the_partial_one() -> None:
    kv = KvCacheManager(8, BLOCK_SIZE)
    donor, child = admitted(kv, "a", range(10)), Holding(RequestId("b"))
    copy = kv.fork(donor, child, 9, 10)
    assert child.table.slice(0, 2) == donor.table.slice(0, 2)
    assert copy is not None
    assert (copy.source, copy.target) == (donor.table[2], child.table[2])
    assert kv.num_in_use == 4
    kv.free(donor)
    assert kv.num_in_use == 3
    kv.check_integrity()


def test_a_fork_at_a_block_border_copies_nothing() -> None:
    kv = KvCacheManager(8, BLOCK_SIZE)
    donor, child = admitted(kv, "a", range(9)), Holding(RequestId("b"))
    assert kv.num_blocks_to_fork(8, 9) == 1
    assert kv.fork(donor, child, 8, 9) is None
    assert child.table[2] != donor.table[2]


def test_growing_takes_a_block_only_at_a_border_and_fails_without_changing_anything() -> None:
    kv = KvCacheManager(2, BLOCK_SIZE)
    holding = admitted(kv, "a", range(4))
    assert kv.try_grow(holding, 5)
    assert kv.try_grow(holding, 8)
    assert not kv.try_grow(holding, 9)
    assert len(holding.table) == 2
    kv.check_integrity()


def test_pinned_blocks_survive_their_request_and_are_released_once() -> None:
    kv = KvCacheManager(4, BLOCK_SIZE)
    holding = admitted(kv, "a", range(8))
    kv.pin(LeaseId("l"), holding.table.slice(0))
    kv.free(holding)
    assert kv.num_in_use == 2
    with pytest.raises(Bug):
        kv.pin(LeaseId("l"), [])
    assert kv.unpin(LeaseId("l"))
    assert not kv.unpin(LeaseId("l"))
    assert kv.num_in_use == 0
    kv.check_integrity()


def test_freeing_twice_changes_nothing() -> None:
    kv = KvCacheManager(4, BLOCK_SIZE)
    holding = admitted(kv, "a", range(8))
    kv.free(holding)
    kv.free(holding)
    kv.check_integrity()


def test_being_admitted_twice_is_a_bug() -> None:
    kv = KvCacheManager(4, BLOCK_SIZE)
    holding = admitted(kv, "a", range(4))
    with pytest.raises(Bug):
        kv.admit(holding, 4, [])


def test_clearing_the_prefix_cache_leaves_running_requests_alone() -> None:
    kv = KvCacheManager(4, BLOCK_SIZE)
    holding = admitted(kv, "a", range(8))
    kv.clear_prefix_cache()
    assert kv.find_prefix(Holding(RequestId("b")), range(8)) == []
    kv.check_integrity()
    kv.free(holding)
    assert kv.num_free == 4

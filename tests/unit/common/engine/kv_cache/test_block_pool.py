import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from common.engine.kv_cache.block_pool import BlockPool
from common.errors import Bug
from common.ids import BlockId


def test_blocks_with_content_are_taken_last_and_the_oldest_of_them_first() -> None:
    pool = BlockPool(4)
    first, second, third, fourth = pool.take(4)
    pool.release(second, keep_content=True)
    pool.release(first, keep_content=True)
    pool.release(fourth, keep_content=False)
    assert pool.take(3) == [fourth, second, first]
    pool.release(third, keep_content=False)
    assert pool.num_free == 1


def test_holding_a_free_block_saves_it_from_being_taken() -> None:
    pool = BlockPool(2)
    block, other = pool.take(2)
    pool.release(block, keep_content=True)
    pool.release(other, keep_content=False)
    pool.hold(block)
    assert pool.take(1) == [other]
    assert pool.num_free == 0


def test_taking_more_than_is_free_is_a_bug() -> None:
    pool = BlockPool(2)
    with pytest.raises(Bug):
        pool.take(3)
    assert pool.num_free == 2


def test_releasing_more_often_than_holding_is_a_bug() -> None:
    pool = BlockPool(1)
    (block,) = pool.take(1)
    pool.release(block, keep_content=False)
    with pytest.raises(Bug):
        pool.release(block, keep_content=False)


def test_a_reference_nobody_accounts_for_is_found() -> None:
    pool = BlockPool(2)
    taken = pool.take(1)
    pool.check_integrity(taken)
    with pytest.raises(Bug, match="1 references"):
        pool.check_integrity([])


def test_a_pool_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        BlockPool(0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "hold", "release"]), st.integers(0, 5), st.booleans())))
def test_references_are_conserved_whatever_happens(moves: list[tuple[str, int, bool]]) -> None:
    pool, held = BlockPool(6), list[BlockId]()
    for move, number, keep in moves:
        if move == "take" and number <= pool.num_free:
            held += pool.take(number)
        elif move == "hold":
            pool.hold(BlockId(number))
            held.append(BlockId(number))
        elif move == "release" and held:
            pool.release(held.pop(number % len(held)), keep_content=keep)
        pool.check_integrity(held)
        assert pool.num_in_use == len(set(held))

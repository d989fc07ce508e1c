"""Byte ranges: what is read is exactly the tokens that were asked for, for any two block sizes."""

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ReferenceRefused
from common.ids import BlockId
from kv_transfer.descriptors import (
    byte_ranges,
    check_bounds,
    in_memory_order,
    layout_differences,
    single_range,
    whole_blocks,
)
from tests.support.kv_pair import layout_of, pool_of, tokens_of


@settings(max_examples=120, deadline=None)
@given(
    local_size=st.integers(1, 8),
    remote_size=st.integers(1, 8),
    num_tokens=st.integers(1, 24),
    skipped_blocks=st.integers(0, 3),
    seed=st.integers(0, 1 << 16),
)
def test_the_ranges_copy_exactly_the_tokens_asked_for(
    local_size: int, remote_size: int, num_tokens: int, skipped_blocks: int, seed: int
) -> None:
    start = min(skipped_blocks * local_size, (num_tokens - 1) // local_size * local_size)
    rng = np.random.default_rng(seed)
    remote_ids = [BlockId(i) for i in rng.permutation(24)[: -(-num_tokens // remote_size)].tolist()]
    local_ids = [BlockId(i) for i in rng.permutation(24)[: -(-num_tokens // local_size) - start // local_size].tolist()]
    remote_pool, local_pool = pool_of(24, remote_size, seed), pool_of(24, local_size)
    local, remote = byte_ranges(
        (layout_of(local_pool, local_size), local_ids),
        (layout_of(remote_pool, remote_size), remote_ids),
        start,
        num_tokens,
    )
    assert np.array_equal(local.lengths, remote.lengths)
    for target, source, length in zip(local.addresses, remote.addresses, local.lengths, strict=True):
        ctypes.memmove(int(target), int(source), int(length))
    wanted = tokens_of(remote_pool, remote_size, remote_ids, start, num_tokens)
    got = tokens_of(local_pool, local_size, local_ids, 0, num_tokens - start)
    assert np.array_equal(wanted, got)
    assert local.num_bytes == wanted.nbytes == np.count_nonzero(local_pool)  # and nothing else was written


def test_blocks_in_a_row_on_both_sides_become_one_range_per_plane_at_most() -> None:
    remote_pool, local_pool = pool_of(8, 8, 1), pool_of(8, 4)
    ids = [BlockId(0)], [BlockId(0), BlockId(1)]
    local, _ = byte_ranges((layout_of(local_pool, 4), ids[1]), (layout_of(remote_pool, 8), ids[0]), 0, 8)
    assert len(local) == 8  # 4 planes, cut once where the local block ends


def test_equal_blocks_that_continue_each_other_merge_into_one() -> None:
    remote_pool, local_pool = pool_of(8, 1, 1), pool_of(8, 1)
    ids = [BlockId(i) for i in range(8)]
    local, _ = byte_ranges((layout_of(local_pool, 1), ids), (layout_of(remote_pool, 1), ids), 0, 1)
    assert len(local) == 1


def test_whole_blocks_covers_a_partial_last_block() -> None:
    ids = [BlockId(i) for i in (9, 8, 7)]
    assert whole_blocks(4, 4, 9, ids).tolist() == [8, 7]
    assert whole_blocks(4, 0, 8, ids).tolist() == [9, 8]


def test_runs_that_lie_backwards_on_both_sides_are_read_forwards() -> None:
    local, remote = in_memory_order(np.array([9, 8, 7, 3], np.int32), np.array([5, 4, 3, 11], np.int32))
    assert (local.tolist(), remote.tolist()) == ([7, 8, 9, 3], [3, 4, 5, 11])


@pytest.mark.parametrize("block_id", [-1, 24, 10**6])
def test_an_id_outside_of_the_pool_is_refused(block_id: int) -> None:
    with pytest.raises(ReferenceRefused, match="outside"):
        check_bounds(layout_of(pool_of(24, 4), 4), [BlockId(block_id)])


def test_layouts_differ_by_shape_but_not_by_block_size_or_place() -> None:
    pool = pool_of(4, 4)
    assert layout_differences(layout_of(pool, 4), layout_of(pool_of(2, 8), 8)) == ()
    (difference,) = layout_differences(layout_of(pool, 4), layout_of(pool, 4, num_layers=3))
    assert "num_layers" in difference


def test_a_single_range_is_one_piece_of_host_memory() -> None:
    one = single_range(64, 32)
    assert (len(one), one.num_bytes, one.device) == (1, 32, "cpu")

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.sampling.top_values import group_maxima, highest_on_host, highest_with_places


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 3000), count=st.integers(1, 50), seed=st.integers(0, 1 << 31), distinct=st.integers(1, 5000))
def test_partial_selection_finds_what_a_sort_finds(size, count, seed, distinct):
    count = min(count, size)
    values = torch.from_numpy(np.random.default_rng(seed).integers(0, distinct, (3, size)).astype(np.float32))
    expected = values.sort(dim=1, descending=True).values[:, :count]
    ours = highest_on_host(values.numpy(), count, group_maxima(values).numpy())
    assert np.array_equal(ours, expected.numpy())
    found, places = highest_with_places(values, count)
    assert torch.equal(found, expected)
    assert torch.equal(values.gather(1, places), expected)
    assert all(len(set(row)) == count for row in places.tolist())


def test_nothing_asked_is_nothing_found():
    values, places = highest_with_places(torch.ones(2, 1000), 0)
    assert (values.shape, places.shape) == ((2, 0), (2, 0))


@pytest.mark.parametrize("place", [0, 63, 64, 959, 960, 999])
def test_a_value_at_any_place_of_a_long_row_is_found(place):
    values = torch.zeros(1, 1000)
    values[0, place] = 1.0
    assert highest_with_places(values, 1)[1].tolist() == [[place]]

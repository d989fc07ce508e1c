import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.sampling.race import GROUP_SIZE, group_totals, race, race_on_device
from common.engine.sampling.random import mix64, row_keys


def keys(num_rows: int, start: int = 0) -> np.ndarray:
    seeds = np.array([mix64(start + row) for row in range(num_rows)], dtype=np.uint64)
    return row_keys(seeds, np.zeros(num_rows, dtype=np.int64))


def as_tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.view(np.int64))


@settings(max_examples=30, deadline=None)
@given(vocab_size=st.integers(1, 3 * GROUP_SIZE), start=st.integers(0, 1 << 60))
def test_host_and_device_races_have_the_same_winners(vocab_size, start):
    weights = torch.rand(5, vocab_size, generator=torch.Generator().manual_seed(start % (1 << 31)))
    tokens, usable = race(weights, keys(5, start))
    other_tokens, other_usable = race_on_device(weights, as_tensor(keys(5, start)))
    assert tokens.tolist() == other_tokens.tolist()
    assert usable.tolist() == other_usable.tolist()


@pytest.mark.parametrize("run", [race, lambda weights, rows: race_on_device(weights, as_tensor(rows))])
@pytest.mark.parametrize("only", [0, 255, 256, 599])
def test_the_only_token_with_weight_always_wins(run, only):
    weights = torch.zeros(40, 600)
    weights[:, only] = 1e-30
    tokens, usable = run(weights, keys(40))
    assert set(tokens.tolist()) == {only}
    assert usable.all()


@pytest.mark.parametrize("run", [race, lambda weights, rows: race_on_device(weights, as_tensor(rows))])
def test_rows_without_weight_or_with_nonsense_are_not_usable(run):
    weights = torch.ones(4, 600)
    weights[0] = 0
    weights[1, 3] = torch.nan
    weights[2, 3] = torch.inf
    _, usable = run(weights, keys(4))
    assert usable.tolist() == [False, False, False, True]


@pytest.mark.parametrize("vocab_size", [1, 255, 256, 257, 1000])
def test_group_totals_cover_every_token_once(vocab_size):
    totals = group_totals(torch.ones(2, vocab_size))
    assert totals.sum(dim=1).tolist() == [vocab_size, vocab_size]


def test_drawn_token_does_not_depend_on_the_scale_of_the_weights():
    weights = torch.rand(50, 1000, generator=torch.Generator().manual_seed(0))
    assert race(weights, keys(50))[0].tolist() == race(weights * 0.25, keys(50))[0].tolist()

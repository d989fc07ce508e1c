import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.sampling.device_race import race_on_device
from common.engine.sampling.race import first_round, group_noise, second_round
from common.engine.sampling.random import exponential_noise, mix64, row_keys
from common.engine.sampling.top_values import GROUP_SIZE


def keys(num_rows: int, start: int = 0) -> np.ndarray:
    seeds = np.array([mix64(start + row) for row in range(num_rows)], dtype=np.uint64)
    return row_keys(seeds, np.zeros(num_rows, dtype=np.int64))


def race(weights: torch.Tensor, row_keys: np.ndarray):
    """Tokens and their usability by both ways, which must agree."""
    whole = torch.nn.functional.pad(weights, (0, -weights.shape[1] % GROUP_SIZE))
    noise = group_noise(row_keys, whole.shape[1] // GROUP_SIZE)
    tokens, usable = second_round(first_round(whole, noise), row_keys)
    other_tokens, other_usable = race_on_device(whole, row_keys)
    assert usable.tolist() == other_usable.tolist()
    assert tokens[usable].tolist() == other_tokens[usable].tolist()
    return tokens, usable


@settings(max_examples=40, deadline=None)
@given(vocab_size=st.integers(1, 3 * GROUP_SIZE), seed=st.integers(0, 1 << 31))
def test_the_winner_is_the_best_token_of_the_best_group(vocab_size, seed):
    weights = np.random.default_rng(seed).random((1, vocab_size)).astype(np.float32)
    starts = range(0, vocab_size, GROUP_SIZE)
    totals = [weights[0, start : start + GROUP_SIZE].sum() for start in starts]
    group_draws = exponential_noise(keys(1, seed), np.arange(len(starts), dtype=np.uint64) + np.uint64(1 << 32))[0]
    group = int(np.argmax(totals / group_draws))
    ids = np.arange(group * GROUP_SIZE, min((group + 1) * GROUP_SIZE, vocab_size))
    draws = exponential_noise(keys(1, seed), ids.astype(np.uint64))[0]
    expected = ids[np.argmax(weights[0, ids] / draws)]
    assert race(torch.from_numpy(weights), keys(1, seed))[0].tolist() == [expected]


@pytest.mark.parametrize("only", [0, 127, 128, 599])
def test_the_only_token_with_weight_always_wins(only):
    weights = torch.zeros(40, 600)
    weights[:, only] = 1e-30
    tokens, usable = race(weights, keys(40))
    assert set(tokens.tolist()) == {only}
    assert usable.all()


def test_rows_without_weight_or_with_nonsense_are_not_usable():
    weights = torch.ones(4, 600)
    weights[0] = 0
    weights[1, 3] = torch.nan
    weights[2, 3] = torch.inf
    _, usable = race(weights, keys(4))
    assert usable.tolist() == [False, False, False, True]


def test_drawn_token_does_not_depend_on_the_scale_of_the_weights():
    weights = torch.rand(50, 1000, generator=torch.Generator().manual_seed(0))
    assert race(weights, keys(50))[0].tolist() == race(weights * 0.25, keys(50))[0].tolist()

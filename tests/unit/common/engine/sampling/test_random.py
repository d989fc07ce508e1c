import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.sampling.random import (
    exponential_noise,
    exponential_noise_on_device,
    mix64,
    row_keys,
    seed_for_choice,
    signed64,
)

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=[pytest.mark.gpu, NEEDS_CUDA])]
UINT64 = st.integers(0, (1 << 64) - 1)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=30, deadline=None)
@given(keys=st.lists(UINT64, min_size=1, max_size=4), first_id=st.integers(0, 1 << 40))
def test_numpy_and_torch_draw_the_same_bits(device, keys, first_id):
    ids = np.arange(first_id, first_id + 300, dtype=np.uint64)
    host = exponential_noise(np.array(keys, dtype=np.uint64), ids)
    there = exponential_noise_on_device(
        torch.tensor([signed64(key) for key in keys], device=device),
        torch.from_numpy(ids.astype(np.int64)).to(device),
    )
    assert np.array_equal(host.view(np.int32), there.cpu().numpy().view(np.int32))


def test_array_mixer_is_the_integer_mixer():
    seeds = [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
    mixed = np.array([mix64(seed) for seed in seeds], dtype=np.uint64)
    positions = np.arange(len(seeds), dtype=np.int64)
    golden = 0x9E3779B97F4A7C15
    expected = [mix64(mix64(seed) + position * golden) for position, seed in enumerate(seeds)]
    assert row_keys(mixed, positions).tolist() == expected


def test_noise_has_the_moments_of_the_unit_exponential():
    noise = exponential_noise(np.arange(20, dtype=np.uint64), np.arange(20_000, dtype=np.uint64)).astype(np.float64)
    assert noise.min() > 0
    assert abs(noise.mean() - 1) < 0.01
    assert abs(noise.var() - 1) < 0.02
    assert abs((noise < np.log(2)).mean() - 0.5) < 0.003


@pytest.mark.parametrize("bit", [0, 1, 31, 32, 62, 63])
def test_one_changed_bit_of_the_seed_gives_unrelated_noise(bit):
    ids = np.arange(20_000, dtype=np.uint64)
    seeds = np.array([mix64(12345), mix64(12345 ^ (1 << bit))], dtype=np.uint64)
    one, other = exponential_noise(row_keys(seeds, np.zeros(2, dtype=np.int64)), ids)
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.03


def test_neighbouring_positions_of_one_seed_have_unrelated_noise():
    ids = np.arange(20_000, dtype=np.uint64)
    seeds = np.array([mix64(7)] * 2, dtype=np.uint64)
    one, other = exponential_noise(row_keys(seeds, np.array([3, 4])), ids)
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.03


def test_choices_of_one_seed_have_different_reproducible_seeds():
    seeds = [seed_for_choice(1, index) for index in range(100)]
    assert seeds == [seed_for_choice(1, index) for index in range(100)]
    assert len(set(seeds)) == 100
    assert not set(seeds) & {seed_for_choice(2, index) for index in range(100)}


def test_no_seed_draws_one():
    assert seed_for_choice(None) != seed_for_choice(None)


def test_negative_and_unsigned_spelling_of_the_same_bits_are_one_seed():
    assert seed_for_choice(-5) == seed_for_choice((1 << 64) - 5)

"""The compiled path samples the same tokens as the torch path, which is held to the definitions elsewhere."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.model.cpu_kernels.build import NEEDED_CPU_FLAGS, cpu_flags
from common.engine.sampling.batch_state import BatchUpdate
from common.engine.sampling.cpu_kernels.library import GreedyRows, SamplingKernels, kernels_for
from common.engine.sampling.grammar_mask import apply_bitmask
from common.engine.sampling.params import SamplingParams
from common.engine.sampling.race import FIRST_GROUP_ID
from common.engine.sampling.random import exponential_noise, mix64
from common.engine.sampling.sampler import SampleOutput, Sampler
from tests.support.sampling_batch import CPU, added

pytestmark = pytest.mark.skipif(not cpu_flags() >= NEEDED_CPU_FLAGS, reason="the kernels need AVX2, FMA and F16C")
SHAPES = ["flat", "peaked", "tied", "masked", "extreme"]


def logits_of(rng: np.random.Generator, shape: str, num_rows: int, vocab_size: int) -> torch.Tensor:
    values = rng.normal(0, 3, (num_rows, vocab_size)).astype(np.float32)
    if shape == "flat":
        values *= 0.01
    elif shape == "peaked":
        values -= 1.8 * np.log1p(rng.permuted(np.tile(np.arange(vocab_size), (num_rows, 1)), axis=1))
    elif shape == "tied":
        values = np.round(values)
    elif shape == "masked":
        values[rng.random(values.shape) < 0.9] = -np.inf
        values[:, 0] = 0.0
    elif shape == "extreme":
        values *= 1e4
    return torch.from_numpy(values.astype(np.float32))


def params_of(rng: np.random.Generator, vocab_size: int) -> SamplingParams:
    return SamplingParams(
        temperature=float(rng.choice([0.0, 0.01, 0.3, 1.0, 2.0], p=[0.1, 0.1, 0.2, 0.3, 0.3])),
        top_k=int(rng.choice([0, 1, 2, 50, vocab_size // 2, vocab_size - 1])),
        top_p=float(rng.choice([1.0, 0.01, 0.5, 0.9, 0.9999])),
        min_p=float(rng.choice([0.0, 0.001, 0.1, 1.0], p=[0.5, 0.2, 0.2, 0.1])),
    )


def sampled(logits: torch.Tensor, params: list[SamplingParams], *, use_kernels: bool) -> SampleOutput:
    sampler = Sampler(logits.shape[1], len(params), CPU, use_kernels=use_kernels)
    rows = tuple(added(row, each, seed=row) for row, each in enumerate(params))
    sampler.update_batch(BatchUpdate(added=rows))
    return sampler.sample(logits.clone(), range(len(params)))


@settings(max_examples=60, deadline=None)
@given(
    vocab_size=st.one_of(st.integers(1, 400), st.sampled_from([128, 1024, 4999, 20001])),
    shape=st.sampled_from(SHAPES),
    seed=st.integers(0, 1 << 32),
)
def test_the_compiled_path_samples_the_same_tokens_as_torch(vocab_size: int, shape: str, seed: int):
    rng = np.random.default_rng(seed)
    params = [params_of(rng, vocab_size) for _ in range(12)]
    logits = logits_of(rng, shape, len(params), vocab_size)
    compiled, torch_path = (sampled(logits, params, use_kernels=use) for use in (True, False))
    assert compiled.failed_rows == torch_path.failed_rows
    assert compiled.token_ids == torch_path.token_ids


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 63, 64, 199, 200])
def test_one_logit_that_is_no_number_fails_its_row_on_both_paths(value: float, place: int):
    params = [SamplingParams(temperature=temperature, top_k=top_k) for temperature in (0.0, 1.0) for top_k in (0, 5)]
    logits = torch.randn(5, 201, generator=torch.Generator().manual_seed(1))
    logits[:4, place] = value
    for use_kernels in (True, False):
        output = sampled(logits, [*params, SamplingParams()], use_kernels=use_kernels)
        assert output.failed_rows == {0, 1, 2, 3}


def test_the_noise_has_the_same_bits_as_numpys():
    key = mix64(7)
    for first in (0, FIRST_GROUP_ID):
        ids = np.arange(first, first + 100_003, dtype=np.uint64)
        expected = exponential_noise(np.array([key], dtype=np.uint64), ids)[0]
        assert np.array_equal(SamplingKernels().noise(key, first, ids.size), expected)


@settings(max_examples=30, deadline=None)
@given(vocab_size=st.integers(1, 300), num_masked=st.integers(0, 4), seed=st.integers(0, 1 << 32))
def test_masks_forbid_the_same_tokens_as_torch(vocab_size: int, num_masked: int, seed: int):
    rng = np.random.default_rng(seed)
    words = rng.choice([0, 0xFFFF_FFFF, 0x5555_5555, 1 << 31], (num_masked, (vocab_size + 31) // 32 + 1)).astype(
        np.uint32
    )
    bitmask = torch.from_numpy(words.view(np.int32))
    rows = rng.permutation(5)[:num_masked]
    logits = torch.from_numpy(rng.normal(size=(5, vocab_size)).astype(np.float32))
    expected = logits.clone()
    if num_masked:
        apply_bitmask(expected, bitmask, rows.tolist())
    SamplingKernels().mask(logits, bitmask, rows.astype(np.int64))
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("vocab_size", [1, 127, 128, 5000])
def test_normalisers_and_ranks_are_torchs(vocab_size: int, shape: str):
    scores = logits_of(np.random.default_rng(3), shape, 4, vocab_size)
    expected = scores.double().logsumexp(dim=1)
    assert SamplingKernels().log_normaliser(scores).tolist() == pytest.approx(expected.tolist(), rel=1e-6, abs=1e-6)
    for num_values in (1, 7, 11, 30):  # one pass over the scores counts for some at once
        values = scores[:, torch.arange(num_values) * 31 % vocab_size]
        counted = (scores.unsqueeze(1) > values.unsqueeze(2)).sum(dim=2)
        assert SamplingKernels().count_above(scores, values).tolist() == counted.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_reported_log_probabilities_and_ranks_are_those_of_the_torch_path(temperature: float):
    params = [
        SamplingParams(temperature=temperature, logprobs=4),
        SamplingParams(temperature=temperature, logprob_token_ids=(3, 99, 0, 7)),
        SamplingParams(temperature=temperature),
        SamplingParams(temperature=temperature, logprob_token_ids=(5,)),
    ]
    logits = logits_of(np.random.default_rng(5), "tied", len(params), 200)
    ours, theirs = (sampled(logits, params, use_kernels=use).logprobs for use in (True, False))
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        if one is None or other is None:
            continue
        for entry, same in zip((one.chosen, *one.top), (other.chosen, *other.top), strict=True):
            assert (entry.token_id, entry.rank) == (same.token_id, same.rank)
            assert entry.logprob == pytest.approx(same.logprob, abs=1e-5)


def test_rows_of_the_result_that_nobody_asked_for_stay_as_they_are():
    tokens, usable = torch.full((4,), 77), torch.zeros(4, dtype=torch.bool)
    assert SamplingKernels().highest(torch.eye(4, 9), GreedyRows(np.array([3, 1]), tokens, usable)) == 0
    assert tokens.tolist() == [77, 1, 77, 3]
    assert usable.tolist() == [False, True, False, True]


def first_highest(logits: torch.Tensor) -> torch.Tensor:
    """What a model that knows says, int64 [R]: -1 where there is none."""
    values = logits.numpy()
    has_none = np.isnan(values).any(axis=1) | np.isinf(values.max(axis=1))
    return torch.from_numpy(np.where(has_none, -1, values.argmax(axis=1)))


@settings(max_examples=60, deadline=None)
@given(
    vocab_size=st.one_of(st.integers(1, 400), st.sampled_from([1024, 4999])),
    shape=st.sampled_from(SHAPES),
    density=st.sampled_from([0.0, 0.002, 0.5, 1.0]),
    seed=st.integers(0, 1 << 32),
)
def test_the_highest_of_what_masks_allow_is_what_masked_logits_give(
    vocab_size: int, shape: str, density: float, seed: int
):
    rng = np.random.default_rng(seed)
    logits = logits_of(rng, shape, 6, vocab_size)
    logits[rng.random(logits.shape) < 0.001] = float("nan")
    bits = rng.random((4, -(-vocab_size // 32) * 32)) < density
    bitmask = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))
    masked_rows = rng.permutation(6)[:4].tolist()
    sampler = Sampler(vocab_size, 6, CPU)
    sampler.update_batch(BatchUpdate(added=tuple(added(row, SamplingParams(temperature=0.0)) for row in range(6))))
    output = sampler.sample(logits.clone(), range(6), bitmask, masked_rows)
    assert sampler.sample(logits.clone(), range(6), bitmask, masked_rows, (), first_highest(logits)) == output
    apply_bitmask(logits, bitmask, masked_rows)
    values = logits.numpy()
    unusable = np.isnan(values).any(axis=1) | np.isinf(values.max(axis=1))
    assert output.failed_rows == set(np.flatnonzero(unusable))
    best = values.argmax(axis=1)
    assert [output.token_ids[row] for row in range(6) if not unusable[row]] == best[~unusable].tolist()


def test_other_devices_have_no_kernels():
    assert kernels_for(torch.device("meta")) is None

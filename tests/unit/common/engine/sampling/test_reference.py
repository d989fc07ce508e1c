"""The pipeline against the definitions, and draws against the distribution."""

import math

import numpy as np
import pytest
import torch

from common.engine.outputs import PositionLogprobs
from common.engine.sampling.batch_state import BatchUpdate
from common.engine.sampling.params import SamplingParams
from common.engine.sampling.sampler import Sampler
from tests.support.reference_sampler import processed_distribution
from tests.support.sampling_batch import CPU, RandomCase, added, random_case, sampler_of

VOCAB_SIZE = 97
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
DEVICES = [CPU, pytest.param(torch.device("cuda"), marks=[pytest.mark.gpu, NEEDS_CUDA])]


def reported_distribution(logprobs: PositionLogprobs | None, vocab_size: int) -> np.ndarray:
    assert logprobs is not None
    distribution = np.zeros(vocab_size)
    for entry in logprobs.top:
        distribution[entry.token_id] = np.exp(entry.logprob)
    return distribution


def sample_case_by_case(cases: list[RandomCase], device: torch.device) -> list[np.ndarray | None]:
    """Distribution of each case, all in one batch; None where no token was left."""
    sampler = Sampler(VOCAB_SIZE, len(cases), device, "processed_logprobs")
    rows = tuple(
        added(
            row,
            case.params,
            prompt_token_ids=case.prompt,
            # The last output tokens arrive by record, as they do in an engine.
            output_token_ids=case.output[: len(case.output) // 2],
            stop_ids=case.stop_ids,
            seed=case.seed,
        )
        for row, case in enumerate(cases)
    )
    sampler.update_batch(BatchUpdate(added=rows))
    for row, case in enumerate(cases):
        late = case.output[len(case.output) // 2 :]
        sampler.record([row] * len(late), late)
    logits = torch.tensor(np.stack([case.logits for case in cases]), device=device)
    output = sampler.sample(logits, range(len(cases)))
    return [
        None if row in output.failed_rows else reported_distribution(output.logprobs[row], VOCAB_SIZE)
        for row in range(len(cases))
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_processed_distribution_equals_the_float64_reference_for_200_random_parameter_sets(device):
    rng = np.random.default_rng(4)
    compared = 0
    for _ in range(10):
        cases = [random_case(rng, VOCAB_SIZE) for _ in range(20)]
        for case, ours in zip(cases, sample_case_by_case(cases, device), strict=True):
            with np.errstate(invalid="ignore"):
                expected = processed_distribution(case.logits, case.params, case.prompt, case.output, case.stop_ids)
            if ours is None:
                assert np.isnan(expected).any(), case
                continue
            np.testing.assert_allclose(ours, expected, atol=1e-5, err_msg=repr(case))
            compared += 1
    assert compared > 180


def chance(counts: np.ndarray, expected: np.ndarray) -> float:
    """Probability of Pearson's statistic being this large or larger; cells expected below 5 are pooled.

    Wilson and Hilferty (1931): the cube root of a chi-square is nearly normal.
    """
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic, degrees = ((observed - wanted) ** 2 / wanted).sum(), len(wanted) - 1
    spread = 2 / (9 * degrees)
    return 0.5 * math.erfc(((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(2 * spread))


@pytest.mark.parametrize("vocab_size", [20, 700])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=1.5, top_k=12, top_p=0.9),
        SamplingParams(min_p=0.02, repetition_penalty=1.3, frequency_penalty=0.4),
    ],
)
def test_drawn_tokens_follow_the_processed_distribution(vocab_size, params):
    rng = np.random.default_rng(8)
    logits = rng.normal(0, 2, vocab_size).astype(np.float32)
    prompt, output = (1, 2, 3), (3, 4, 4)
    num_rows, rounds = 300, 10
    sampler = Sampler(vocab_size, num_rows, CPU)
    counts = np.zeros(vocab_size)
    for number in range(rounds):
        rows = tuple(
            added(row, params, prompt_token_ids=prompt, output_token_ids=output, seed=number * num_rows + row)
            for row in range(num_rows)
        )
        sampler.update_batch(BatchUpdate(removed=tuple(range(num_rows)) if number else (), added=rows))
        drawn = sampler.sample(torch.tensor(logits).repeat(num_rows, 1), range(num_rows)).token_ids
        counts += np.bincount(drawn, minlength=vocab_size)
    expected = processed_distribution(logits, params, prompt, output, frozenset({0})) * num_rows * rounds
    assert counts[expected == 0].sum() == 0
    assert chance(counts, expected) > 1e-3


def test_successive_positions_of_one_seed_are_independent_draws():
    sampler = sampler_of(SamplingParams(max_tokens=20000), vocab_size=8)
    logits = torch.zeros(1, 8)
    tokens = []
    for _ in range(3000):
        tokens.append(sampler.sample(logits.clone(), [0]).token_ids[0])
        sampler.record([0], tokens[-1:])
    pairs = np.bincount(np.array(tokens[:-1]) * 8 + tokens[1:], minlength=64)
    assert chance(pairs.astype(float), np.full(64, (len(tokens) - 1) / 64)) > 1e-3

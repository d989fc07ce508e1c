import math

import numpy as np
import pytest
import torch

from common.engine.sampling.logprobs import LOGPROB_FLOOR
from common.engine.sampling.params import SamplingParams
from tests.support.reference_sampler import penalised, processed_distribution
from tests.support.sampling_batch import sampler_of

LOGITS = (2.0, 1.0, 0.5, 3.0, -1.0)


def only(sampler, bitmask=None):
    output = sampler.sample(torch.tensor([LOGITS]), [0], bitmask, [0] if bitmask is not None else [])
    logprobs = output.logprobs[0]
    assert logprobs is not None
    assert logprobs.chosen.token_id == output.token_ids[0]
    return logprobs


@pytest.mark.parametrize("temperature", [0.0, 0.5])
@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"])
def test_each_mode_reports_its_own_numbers(mode, temperature):
    params = SamplingParams(temperature=temperature, top_k=3 if temperature else 0, logit_bias=((1, 1.5),), logprobs=-1)
    logprobs = only(sampler_of(params, vocab_size=5, mode=mode))
    raw = np.array(LOGITS)
    processed = penalised(raw, params, (), (), frozenset())
    if mode == "raw_logits":
        expected = raw
    elif mode == "raw_logprobs":
        expected = raw - np.log(np.exp(raw).sum())
    elif mode == "processed_logits":
        expected = processed / (temperature or 1.0)
    elif temperature:
        with np.errstate(divide="ignore"):
            expected = np.log(processed_distribution(raw, params, (), (), frozenset()))
    else:
        expected = processed - np.log(np.exp(processed).sum())
    kept = 3 if mode.startswith("processed") and temperature else 5
    for entry in logprobs.top[:kept]:
        assert entry.logprob == pytest.approx(expected[entry.token_id], abs=1e-5)
    assert [entry.logprob for entry in logprobs.top[kept:]] == [LOGPROB_FLOOR] * (5 - kept)


def test_zero_alternatives_report_the_chosen_token_alone():
    logprobs = only(sampler_of(SamplingParams(temperature=0.0, logprobs=0), vocab_size=5))
    assert logprobs.top == ()
    assert (logprobs.chosen.token_id, logprobs.chosen.rank) == (3, 1)


def test_alternatives_come_best_first_with_ranks_and_the_chosen_tokens_own_rank():
    logprobs = only(sampler_of(SamplingParams(temperature=0.0, logit_bias=((4, 50.0),), logprobs=3), vocab_size=5))
    assert (logprobs.chosen.token_id, logprobs.chosen.rank) == (4, 5)
    assert [(entry.token_id, entry.rank) for entry in logprobs.top] == [(3, 1), (0, 2), (1, 3)]


def test_equal_logits_share_a_rank():
    sampler = sampler_of(SamplingParams(temperature=0.0, logprobs=4), vocab_size=4)
    logprobs = sampler.sample(torch.tensor([[1.0, 2.0, 2.0, 0.0]]), [0]).logprobs[0]
    assert [entry.rank for entry in logprobs.top] == [1, 1, 3, 4]
    assert logprobs.chosen.rank == 1


def test_a_token_masked_by_the_grammar_is_reported_at_a_finite_floor():
    sampler = sampler_of(SamplingParams(temperature=0.0, logprobs=5), vocab_size=5)
    logprobs = only(sampler, torch.tensor([[0b00010]], dtype=torch.int32))
    assert logprobs.chosen.token_id == 1
    assert logprobs.chosen.logprob == pytest.approx(0.0)
    assert [entry.logprob for entry in logprobs.top[1:]] == [LOGPROB_FLOOR] * 4
    assert all(math.isfinite(entry.logprob) for entry in logprobs.top)


def test_named_tokens_are_reported_instead_of_the_best():
    params = SamplingParams(temperature=0.0, logprob_token_ids=(4, 1, 0), logprobs=2)
    logprobs = only(sampler_of(params, vocab_size=5, mode="raw_logits"))
    assert [(entry.token_id, entry.logprob, entry.rank) for entry in logprobs.top] == [
        (0, 2.0, 2),
        (1, 1.0, 3),
        (4, -1.0, 5),
    ]


def test_rows_that_ask_for_nothing_get_nothing():
    sampler = sampler_of(SamplingParams(), SamplingParams(logprobs=1), SamplingParams(), vocab_size=5)
    logprobs = sampler.sample(torch.zeros(3, 5), [0, 1, 2]).logprobs
    assert [entry is None for entry in logprobs] == [True, False, True]
    assert len(logprobs[1].top) == 1


def test_raw_logprobs_are_taken_before_penalties_and_temperature():
    params = SamplingParams(temperature=0.5, frequency_penalty=2.0, logprobs=5)
    sampler = sampler_of(params, vocab_size=5, output_token_ids=(3, 3, 3))
    logprobs = only(sampler)
    expected = torch.tensor(LOGITS).log_softmax(0)
    for entry in logprobs.top:
        assert entry.logprob == pytest.approx(float(expected[entry.token_id]), abs=1e-5)

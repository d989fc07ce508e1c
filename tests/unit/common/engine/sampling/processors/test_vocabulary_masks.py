"""allowed_token_ids, bad_words, min_tokens, logit_bias: what greedy sampling is left with."""

import torch

from common.engine.sampling.batch_state import BatchUpdate
from common.engine.sampling.params import SamplingParams
from tests.support.sampling_batch import added, sampler_of

GREEDY = SamplingParams(temperature=0.0)


def greedy(**changes) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=100, **changes)


def step(sampler, rows=(0,), logits=None, vocab_size=10):
    """Samples and records; default logits prefer high ids."""
    one = torch.arange(vocab_size, dtype=torch.float32) if logits is None else torch.tensor(logits)
    output = sampler.sample(one.repeat(len(rows), 1), rows)
    assert not output.failed_rows
    sampler.record(rows, output.token_ids)
    return output.token_ids


def bitmask(*tokens: int) -> torch.Tensor:
    return torch.tensor([[sum(1 << token for token in tokens)]], dtype=torch.int32)


def test_only_allowed_tokens_are_sampled_and_other_rows_are_free():
    sampler = sampler_of(greedy(allowed_token_ids=(2, 4)), GREEDY, greedy(allowed_token_ids=(1,)), vocab_size=10)
    assert step(sampler, (0, 1, 2)) == [4, 9, 1]
    assert step(sampler, (2, 0)) == [1, 4]


def test_allowed_tokens_meet_the_grammar_mask():
    sampler = sampler_of(greedy(allowed_token_ids=(2, 4)), vocab_size=10)
    logits = torch.arange(10, dtype=torch.float32).unsqueeze(0)
    assert sampler.sample(logits.clone(), [0], bitmask(2, 9), [0]).token_ids == [2]
    assert sampler.sample(logits.clone(), [0], bitmask(3, 9), [0]).failed_rows == {0}


def test_a_one_token_bad_word_never_appears():
    sampler = sampler_of(greedy(bad_words_token_ids=((9,), (8,))), vocab_size=10)
    assert [step(sampler)[0] for _ in range(3)] == [7, 7, 7]


def test_the_last_token_of_a_bad_word_is_masked_only_after_the_others():
    sampler = sampler_of(greedy(bad_words_token_ids=((9, 9, 9), (9, 8))), vocab_size=10)
    assert [step(sampler)[0] for _ in range(7)] == [9, 9, 7, 9, 9, 7, 9]


def test_a_bad_word_does_not_match_across_the_prompt():
    sampler = sampler_of(greedy(bad_words_token_ids=((9, 9),)), vocab_size=10, prompt_token_ids=(9,))
    assert [step(sampler)[0] for _ in range(2)] == [9, 8]


def test_a_resumed_row_remembers_the_start_of_a_bad_word():
    sampler = sampler_of(greedy(bad_words_token_ids=((5, 9, 9),)), vocab_size=10, output_token_ids=(1, 5, 9))
    assert step(sampler) == [8]


def test_a_longer_bad_word_entering_the_batch_keeps_the_tails_of_the_others():
    sampler = sampler_of(greedy(bad_words_token_ids=((9, 9),)), vocab_size=10)
    assert step(sampler) == [9]
    long_word = greedy(bad_words_token_ids=((1, 2, 3, 4, 5),))
    sampler.update_batch(BatchUpdate(added=(added(1, long_word),)))
    assert step(sampler, (0, 1)) == [8, 9]


def test_no_stop_id_of_any_kind_is_sampled_before_min_tokens():
    params = greedy(min_tokens=20, logit_bias=((9, 50.0), (8, 40.0)))
    sampler = sampler_of(params, vocab_size=10, stop_ids=frozenset({8, 9}))
    tokens = [step(sampler)[0] for _ in range(21)]
    assert not {8, 9} & set(tokens[:20])
    assert tokens[20] == 9


def test_a_grammar_that_can_only_end_wins_over_min_tokens():
    params = greedy(min_tokens=10)
    sampler = sampler_of(params, params, vocab_size=10, stop_ids=frozenset({0, 1}))
    masks = torch.cat((bitmask(0, 1), bitmask(0, 5)))
    output = sampler.sample(torch.zeros(2, 10), [0, 1], masks, [0, 1])
    assert not output.failed_rows
    assert output.token_ids[0] in {0, 1}
    assert output.token_ids[1] == 5


def test_min_tokens_of_a_resumed_row_counts_its_earlier_output():
    sampler = sampler_of(greedy(min_tokens=3), vocab_size=10, output_token_ids=(1, 2), stop_ids=frozenset({9}))
    assert [step(sampler)[0] for _ in range(2)] == [8, 9]


def test_logits_rows_that_change_between_steps_keep_their_own_minimum():
    sampler = sampler_of(greedy(min_tokens=2), GREEDY, vocab_size=10, stop_ids=frozenset({9}))
    mask = bitmask(*range(10))
    for rows, expected in (([1, 0], [9, 8]), ([0], [8]), ([0, 1], [9, 9])):
        logits = torch.arange(10, dtype=torch.float32).repeat(len(rows), 1)
        output = sampler.sample(logits, rows, mask.repeat(len(rows), 1), range(len(rows)))
        assert output.token_ids == expected
        sampler.record(rows, output.token_ids)


def test_bias_moves_the_choice_and_cannot_unmask():
    sampler = sampler_of(greedy(logit_bias=((2, 100.0), (9, -100.0))), vocab_size=10)
    assert step(sampler) == [2]
    masked = sampler.sample(torch.arange(10, dtype=torch.float32).unsqueeze(0), [0], bitmask(3, 9), [0])
    assert masked.token_ids == [3]

import pytest
import torch

from common.engine.sampling.batch_state import BatchUpdate, MovedRow
from common.engine.sampling.params import SamplingParams
from common.engine.sampling.processors.thinking_budget import OutputMarkers
from common.engine.sampling.sampler import Sampler
from tests.support.sampling_batch import CPU, added

THINK, END_THINK, CALL, END_CALL, END_1, END_2, WORD = 90, 91, 92, 93, 94, 95, 7
SINGLE = OutputMarkers(think_start=(THINK,), think_end=(END_THINK,), tool_start=(CALL,), tool_end=(END_CALL,))
DOUBLE = OutputMarkers(think_start=(THINK,), think_end=(END_1, END_2))
VOCAB_SIZE = 100


def sampler_with(budget: int | None, markers=SINGLE, **changes) -> Sampler:
    sampler = Sampler(VOCAB_SIZE, 8, CPU, markers=markers)
    params = SamplingParams(temperature=0.0, max_tokens=1000, thinking_token_budget=budget)
    sampler.update_batch(BatchUpdate(added=(added(0, params, **changes),)))
    return sampler


def speak(sampler: Sampler, wanted: list[int], row: int = 0) -> list[int]:
    """The model wants to say these tokens; what comes out."""
    said = []
    for token in wanted:
        logits = torch.zeros(1, VOCAB_SIZE)
        logits[0, token] = 5.0
        output = sampler.sample(logits, [row])
        assert not output.failed_rows
        sampler.record([row], output.token_ids)
        said += output.token_ids
    return said


@pytest.mark.parametrize("budget", [0, 1, 50, 256])
def test_the_end_marker_comes_right_after_the_budget_and_only_once(budget):
    said = speak(sampler_with(budget), [THINK, *[WORD] * 400])
    assert said == [THINK, *[WORD] * budget, END_THINK, *[WORD] * (399 - budget)]


def test_thinking_that_ends_in_time_is_left_alone():
    wanted = [THINK, WORD, WORD, END_THINK, *[WORD] * 50]
    assert speak(sampler_with(10), wanted) == wanted


def test_no_budget_never_forces():
    wanted = [THINK, *[WORD] * 50]
    assert speak(sampler_with(None), wanted) == wanted


def test_thinking_opened_by_the_prompt_counts_from_its_marker():
    said = speak(sampler_with(5, prompt_token_ids=(1, THINK, WORD, WORD)), [WORD] * 6)
    assert said == [WORD, WORD, WORD, END_THINK, WORD, WORD]


def test_thinking_closed_in_the_prompt_does_not_count():
    prompt = (THINK, *[WORD] * 20, END_THINK, 1)
    said = speak(sampler_with(2, prompt_token_ids=prompt), [WORD, THINK, WORD, WORD, WORD])
    assert said == [WORD, THINK, WORD, WORD, END_THINK]


def test_thinking_opened_again_after_the_budget_is_closed_at_once():
    said = speak(sampler_with(2), [THINK, WORD, WORD, WORD, WORD, THINK, WORD, WORD])
    assert said == [THINK, WORD, WORD, END_THINK, WORD, THINK, END_THINK, WORD]


def test_the_budget_is_shared_by_all_sections_of_an_output():
    said = speak(sampler_with(3), [THINK, WORD, END_THINK, THINK, WORD, WORD, WORD])
    assert said == [THINK, WORD, END_THINK, THINK, WORD, WORD, END_THINK]


def test_nothing_is_forced_inside_a_tool_call():
    wanted = [THINK, CALL, *[WORD] * 10, END_CALL, WORD]
    assert speak(sampler_with(3), wanted) == [*wanted[:-1], END_THINK]


def test_a_think_marker_inside_a_tool_call_is_an_argument():
    wanted = [CALL, THINK, *[WORD] * 10, END_CALL, WORD]
    assert speak(sampler_with(2), wanted) == wanted


def test_a_marker_of_two_tokens_is_forced_token_by_token():
    assert speak(sampler_with(2, DOUBLE), [THINK, WORD, WORD, WORD, WORD, WORD]) == [
        THINK,
        WORD,
        WORD,
        END_1,
        END_2,
        WORD,
    ]


def test_a_marker_the_model_has_begun_is_completed_not_repeated():
    assert speak(sampler_with(2, DOUBLE), [THINK, WORD, END_1, WORD, WORD]) == [THINK, WORD, END_1, END_2, WORD]


def test_a_resumed_or_moved_row_knows_what_it_has_thought():
    sampler = sampler_with(5, output_token_ids=(THINK, WORD, WORD, WORD))
    sampler.update_batch(BatchUpdate(moved=(MovedRow(source=0, target=4),)))
    assert speak(sampler, [WORD, WORD, WORD, WORD], row=4) == [WORD, WORD, END_THINK, WORD]


def test_the_budget_holds_under_speculation():
    sampler = sampler_with(2, output_token_ids=(THINK, WORD))
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[:, WORD] = 5.0
    output = sampler.sample(logits, [0, 0, 0], drafts=[(), (WORD,), (WORD, END_THINK)])
    assert output.token_ids == [WORD, END_THINK, WORD]


def test_forcing_wins_over_bad_words_but_not_over_a_grammar():
    sampler = Sampler(VOCAB_SIZE, 8, CPU, markers=SINGLE)
    params = SamplingParams(temperature=0.0, thinking_token_budget=0, bad_words_token_ids=((END_THINK,),))
    rows = tuple(added(row, params, prompt_token_ids=(THINK,)) for row in range(2))
    sampler.update_batch(BatchUpdate(added=rows))
    mask = torch.zeros(1, 4, dtype=torch.int32)
    mask[0, 0] = 1 << WORD
    output = sampler.sample(torch.zeros(2, VOCAB_SIZE), [0, 1], mask, [1])
    assert output.token_ids == [END_THINK, WORD]


def test_only_the_row_with_the_budget_is_forced():
    sampler = sampler_with(0, prompt_token_ids=(THINK,))
    other = SamplingParams(temperature=0.0)
    sampler.update_batch(BatchUpdate(added=(added(1, other, prompt_token_ids=(THINK,)),)))
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[:, WORD] = 5.0
    assert sampler.sample(logits, [0, 1]).token_ids == [END_THINK, WORD]

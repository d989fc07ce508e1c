"""The sampler as the engine core drives it: membership, positions, masks, failures."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.sampling.batch_state import BatchUpdate, MovedRow
from common.engine.sampling.params import SamplingParams
from common.engine.sampling.sampler import Sampler
from tests.support.sampling_batch import CPU, RandomCase, added, random_case, sampler_of

VOCAB_SIZE = 300


def logits_of(case: RandomCase, position: int) -> torch.Tensor:
    """Float32 [vocab_size], a function of the case and the position alone."""
    rng = np.random.default_rng(abs(case.seed) + position)
    return torch.from_numpy(rng.normal(0, 3, len(case.logits)).astype(np.float32))


def row_of(row: int, case: RandomCase, output: tuple[int, ...]):
    return added(
        row, case.params, prompt_token_ids=case.prompt, output_token_ids=output, stop_ids=case.stop_ids, seed=case.seed
    )


def tokens_alone(case: RandomCase, steps: int) -> list[int | None]:
    """What the case samples when it is the only request."""
    sampler = Sampler(VOCAB_SIZE, 8, CPU)
    sampler.update_batch(BatchUpdate(added=(row_of(0, case, case.output),)))
    tokens: list[int | None] = []
    for step in range(steps):
        output = sampler.sample(logits_of(case, step).unsqueeze(0), [0])
        if output.failed_rows:
            return [*tokens, None]
        sampler.record([0], output.token_ids)
        tokens.append(output.token_ids[0])
    return tokens


def bits(allowed: list[set[int]], vocab_size: int) -> torch.Tensor:
    words = np.zeros((len(allowed), (vocab_size + 31) // 32), dtype=np.uint32)
    for row, tokens in enumerate(allowed):
        for token in tokens:
            words[row, token >> 5] |= np.uint32(1 << (token & 31))
    return torch.from_numpy(words.view(np.int32))


def test_greedy_takes_the_highest_logit_and_the_first_of_ties():
    sampler = sampler_of(SamplingParams(temperature=0.0), SamplingParams(temperature=0.0), vocab_size=5)
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0, 2.0], [9.0, 1.0, 1.0, 1.0, 1.0]])
    assert sampler.sample(logits, [0, 1]).token_ids == [1, 0]


def test_sampling_twice_without_record_gives_the_same_token():
    sampler = sampler_of(SamplingParams(), vocab_size=500)
    logits = torch.zeros(1, 500)
    first = sampler.sample(logits.clone(), [0]).token_ids
    assert sampler.sample(logits.clone(), [0]).token_ids == first
    sampler.record([0], first)
    assert sampler.sample(logits.clone(), [0]).token_ids != first


def test_an_empty_step_samples_nothing():
    output = sampler_of(SamplingParams()).sample(torch.empty(0, 32), [])
    assert (output.token_ids, output.logprobs, output.failed_rows) == ([], [], frozenset())


@settings(max_examples=10, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1 << 32))
def test_permuting_adding_removing_and_moving_rows_never_changes_another_rows_tokens(data, seed):
    rng = np.random.default_rng(seed)
    cases = [random_case(rng, VOCAB_SIZE) for _ in range(6)]
    alone = [tokens_alone(case, 5) for case in cases]
    sampler = Sampler(VOCAB_SIZE, 8, CPU)
    where: dict[int, int] = {}
    outputs: dict[int, list[int]] = {index: [] for index in range(len(cases))}
    over: set[int] = set()
    for _ in range(12):
        entering, moved = [], []
        leaving = [index for index in where if index in over or data.draw(st.integers(0, 5)) == 0]
        removed = [where.pop(index) for index in leaving]
        free = [row for row in range(8) if row not in where.values()]
        for index in data.draw(st.permutations(range(len(cases)))):
            if index not in where and index not in over and free and data.draw(st.booleans()):
                where[index] = free.pop(data.draw(st.integers(0, len(free) - 1)))
                entering.append(row_of(where[index], cases[index], (*cases[index].output, *outputs[index])))
        if where and free and data.draw(st.booleans()):
            index = data.draw(st.sampled_from(sorted(where)))
            moved.append(MovedRow(source=where[index], target=free.pop()))
            where[index] = moved[0].target
        sampler.update_batch(BatchUpdate(removed=tuple(removed), added=tuple(entering), moved=tuple(moved)))
        running = data.draw(st.permutations(sorted(where)))
        running = running[: data.draw(st.integers(0, len(running)))]
        if not running:
            continue
        logits = torch.stack([logits_of(cases[index], len(outputs[index])) for index in running])
        output = sampler.sample(logits, [where[index] for index in running])
        kept = [place for place in range(len(running)) if place not in output.failed_rows]
        for place, index in enumerate(running):
            position = len(outputs[index])
            expected = alone[index][position]
            assert (None if place in output.failed_rows else output.token_ids[place]) == expected
            if expected is not None:
                outputs[index].append(expected)
            if expected is None or len(outputs[index]) == 5:
                over.add(index)
        sampler.record([where[running[place]] for place in kept], [output.token_ids[place] for place in kept])


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_several_logits_rows_of_one_request_sample_what_one_after_the_other_would(seed):
    rng = np.random.default_rng(seed)
    cases = [random_case(rng, VOCAB_SIZE) for _ in range(3)]
    alone = [tokens_alone(case, 4) for case in cases]
    sampler = Sampler(VOCAB_SIZE, 8, CPU)
    sampler.update_batch(BatchUpdate(added=tuple(row_of(row, case, case.output) for row, case in enumerate(cases))))
    rows, drafts, logits, expected = [], [], [], []
    for row, case in enumerate(cases):
        for position, token in enumerate(alone[row]):
            rows.append(row)
            drafts.append(alone[row][:position])
            logits.append(logits_of(case, position))
            expected.append(token)
    output = sampler.sample(torch.stack(logits), rows, drafts=drafts)
    ours = [None if place in output.failed_rows else token for place, token in enumerate(output.token_ids)]
    assert ours == expected


def test_a_seeded_request_is_the_same_alone_and_among_seven_unseeded_ones():
    seeded = SamplingParams(temperature=0.8, seed=42)
    logits = torch.randn(8, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    alone = sampler_of(seeded, vocab_size=VOCAB_SIZE, seed=42).sample(logits[3:4].clone(), [0]).token_ids[0]
    crowd = Sampler(VOCAB_SIZE, 8, CPU)
    crowd.update_batch(
        BatchUpdate(added=tuple(added(row, SamplingParams(), seed=row + 100) for row in range(8) if row != 3))
    )
    crowd.update_batch(BatchUpdate(added=(added(3, seeded, seed=42),)))
    assert crowd.sample(logits.clone(), range(8)).token_ids[3] == alone


def test_a_request_resumed_after_preemption_continues_as_if_nothing_had_happened():
    case = random_case(np.random.default_rng(11), VOCAB_SIZE)
    tokens = tokens_alone(case, 6)
    sampler = Sampler(VOCAB_SIZE, 8, CPU)
    sampler.update_batch(BatchUpdate(added=(row_of(5, case, (*case.output, *tokens[:3])),)))
    assert sampler.sample(logits_of(case, 3).unsqueeze(0), [5]).token_ids == tokens[3:4]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_any_allowed_token_fails_and_its_neighbours_do_not(temperature):
    params = SamplingParams(temperature=temperature)
    sampler = sampler_of(params, params, params, vocab_size=40)
    output = sampler.sample(torch.zeros(3, 40), [0, 1, 2], bits([set(), {39}], 40), [1, 2])
    assert output.failed_rows == {1}
    assert output.token_ids[2] == 39


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_no_numbers_fail_their_row(temperature, value):
    sampler = sampler_of(SamplingParams(temperature=temperature), vocab_size=40)
    logits = torch.full((1, 40), value)
    assert sampler.sample(logits, [0]).failed_rows == {0}


@settings(max_examples=25, deadline=None)
@given(
    allowed=st.lists(st.sets(st.integers(0, 69), min_size=1), min_size=1, max_size=5),
    temperature=st.sampled_from([0.0, 1.0]),
    plain=st.integers(0, 2),
)
def test_masked_rows_sample_inside_their_mask_and_plain_rows_are_untouched(allowed, temperature, plain):
    num_rows = len(allowed) + plain
    params = SamplingParams(temperature=temperature)
    logits = torch.randn(num_rows, 70, generator=torch.Generator().manual_seed(plain))
    masked_rows = list(range(plain, num_rows))[::-1]
    sampler = sampler_of(*[params] * num_rows, vocab_size=70)
    free = sampler.sample(logits.clone(), range(num_rows)).token_ids
    output = sampler.sample(logits.clone(), range(num_rows), bits(allowed, 70), masked_rows)
    assert not output.failed_rows
    assert output.token_ids[:plain] == free[:plain]
    for row, tokens in zip(masked_rows, allowed, strict=True):
        assert output.token_ids[row] in tokens


def test_rows_of_a_removed_request_carry_nothing_over_to_the_next_one():
    heavy = SamplingParams(
        temperature=0.0,
        repetition_penalty=2.0,
        logit_bias=((1, 50.0),),
        allowed_token_ids=(1,),
        bad_words_token_ids=((2,),),
        min_tokens=5,
        logprobs=2,
    )
    sampler = sampler_of(heavy, vocab_size=8)
    sampler.update_batch(BatchUpdate(removed=(0,), added=(added(0, SamplingParams(temperature=0.0)),)))
    output = sampler.sample(torch.tensor([[9.0, 0, 8, 0, 0, 0, 0, 0]]), [0])
    assert output.token_ids == [0]
    assert output.logprobs == [None]


def test_an_added_row_may_take_a_removed_one_and_be_moved_in_the_same_update():
    sampler = sampler_of(SamplingParams(temperature=0.0), vocab_size=8)
    biased = added(0, SamplingParams(temperature=0.0, logit_bias=((5, 9.0),)))
    sampler.update_batch(BatchUpdate(removed=(0,), added=(biased,), moved=(MovedRow(source=0, target=3),)))
    assert sampler.sample(torch.zeros(1, 8), [3]).token_ids == [5]


def test_two_choices_of_one_request_differ_by_their_seeds():
    sampler = Sampler(1000, 4, CPU)
    params = SamplingParams(n=2)
    sampler.update_batch(BatchUpdate(added=(added(0, params, seed=1), added(1, params, seed=2))))
    assert len(set(sampler.sample(torch.zeros(2, 1000), [0, 1]).token_ids)) == 2

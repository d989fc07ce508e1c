import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.sampling.batch_state import BatchUpdate, LogitsRows, MovedRow
from common.engine.sampling.params import SamplingParams
from common.engine.sampling.processors.penalties import Penalties
from tests.support.reference_sampler import penalised
from tests.support.sampling_batch import CPU, added, sampler_of

VOCAB_SIZE = 50
tokens = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=12)


def rows_of(*persistent: int, drafts: tuple[tuple[int, ...], ...] = ()) -> LogitsRows:
    return LogitsRows(
        persistent=persistent,
        index=torch.tensor(persistent),
        positions=np.zeros(len(persistent), dtype=np.int64),
        drafts=drafts,
    )


def penalty_params(repetition: float = 1.0, frequency: float = 0.0, presence: float = 0.0) -> SamplingParams:
    return SamplingParams(
        repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence, max_tokens=100
    )


@settings(max_examples=50, deadline=None)
@given(
    histories=st.lists(st.tuples(tokens, tokens, tokens, tokens), min_size=1, max_size=4),
    strengths=st.tuples(st.floats(0.3, 3), st.floats(-2, 2), st.floats(-2, 2)),
    only_one=st.booleans(),
)
def test_counts_kept_token_by_token_equal_counts_taken_from_the_history(histories, strengths, only_one):
    params = penalty_params(*(1.0, strengths[1], 0.0) if only_one else strengths)
    penalties = Penalties(VOCAB_SIZE, 8, CPU)
    penalties.update_state(
        BatchUpdate(
            added=tuple(
                added(row, params, prompt_token_ids=prompt, output_token_ids=early)
                for row, (prompt, early, _, _) in enumerate(histories)
            )
        )
    )
    for row, (_, _, late, _) in enumerate(histories):
        for token in late:
            penalties.record(np.array([row]), np.array([token]))
    moved = tuple(MovedRow(source=row, target=row + 4) for row in range(len(histories)))
    penalties.update_state(BatchUpdate(moved=moved))
    logits = torch.randn(len(histories), VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    drafts = tuple(tuple(draft) for *_, draft in histories)
    rows = rows_of(*range(4, 4 + len(histories)), drafts=drafts if any(drafts) else ())
    ours = penalties.apply(logits.clone(), rows)
    for row, (prompt, early, late, draft) in enumerate(histories):
        output = [*early, *late, *draft]
        expected = penalised(logits[row].numpy(), params, prompt, output, frozenset())
        np.testing.assert_allclose(ours[row].numpy(), expected, atol=1e-5)


def test_repetition_penalty_sees_prompt_tokens_that_were_computed_elsewhere():
    sampler = sampler_of(SamplingParams(temperature=0.0, repetition_penalty=2.0), vocab_size=10, prompt_token_ids=(9,))
    assert sampler.sample(torch.arange(10, dtype=torch.float32).unsqueeze(0), [0]).token_ids == [8]


def test_frequency_and_presence_ignore_the_prompt():
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0)
    sampler = sampler_of(params, vocab_size=10, prompt_token_ids=(9, 9))
    assert sampler.sample(torch.arange(10, dtype=torch.float32).unsqueeze(0), [0]).token_ids == [9]


@pytest.mark.parametrize(("penalty", "expected"), [(2.0, [9, 8, 9, 7, 8, 9]), (-2.0, [9] * 6)])
def test_opposite_frequency_penalties_give_opposite_texts(penalty, expected):
    sampler = sampler_of(SamplingParams(temperature=0.0, frequency_penalty=penalty), vocab_size=10)
    text = []
    for _ in range(6):
        text += sampler.sample(torch.arange(10, dtype=torch.float32).unsqueeze(0) * 1.5, [0]).token_ids
        sampler.record([0], text[-1:])
    assert text == expected


def test_several_tokens_recorded_at_once_all_count():
    sampler = sampler_of(SamplingParams(temperature=0.0, frequency_penalty=2.0), vocab_size=10)
    sampler.record([0, 0, 0], [9, 9, 8])
    assert sampler.sample(torch.arange(10, dtype=torch.float32).unsqueeze(0), [0]).token_ids == [7]


def test_tokens_outside_the_vocabulary_of_the_logits_are_ignored():
    sampler = sampler_of(
        SamplingParams(temperature=0.0, repetition_penalty=2.0), vocab_size=10, prompt_token_ids=(9, 10, 400)
    )
    assert sampler.sample(torch.arange(10, dtype=torch.float32).unsqueeze(0), [0]).token_ids == [8]


def test_many_rows_come_and_go_without_mixing_their_counts():
    penalties = Penalties(VOCAB_SIZE, 64, CPU)
    params = penalty_params(frequency=1.0)
    for generation in range(3):
        rows = tuple(added(row, params, output_token_ids=[row + generation]) for row in range(20))
        penalties.update_state(BatchUpdate(removed=tuple(range(20)) if generation else (), added=rows))
        changed = penalties.apply(torch.zeros(20, VOCAB_SIZE), rows_of(*range(20)))
        assert changed.nonzero().tolist() == [[row, row + generation] for row in range(20)]

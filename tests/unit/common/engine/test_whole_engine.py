"""The real decoder (tiny, random), the real sampler, the real cache: nothing the engine does to a batch shows in it."""

import dataclasses

import pytest

from common.engine.model.loaded import LoadedModel
from common.engine.request_state import FinishReason
from common.engine.sampling.params import SamplingParams
from tests.support.fake_engine import greedy
from tests.support.tiny_engine import TinyEngine
from tests.support.tiny_model import tiny_model


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model()


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(i * 37 + salt * 101 + 11) % 250 for i in range(length)]


PROMPTS = [prompt_of(length, salt) for salt, length in enumerate((1, 7, 8, 9, 15, 16, 17, 33, 40, 63, 64, 65))]
SAMPLINGS = {
    "greedy": greedy(24),
    "seeded": SamplingParams(temperature=0.9, seed=42, max_tokens=24, top_p=0.9),
    "penalised": SamplingParams(temperature=0.7, seed=7, max_tokens=24, repetition_penalty=1.3, frequency_penalty=0.4),
}


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel) -> dict[str, list[list[int]]]:
    """Each prompt served alone, whole, without any reuse."""
    engine = TinyEngine(loaded, budget=128, prefix_cache=False)
    return {name: [engine.alone(prompt, params) for prompt in PROMPTS] for name, params in SAMPLINGS.items()}


@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize(
    ("num_blocks", "max_num_seqs", "budget"),
    [(256, 8, 64), (256, 12, 12), (26, 8, 24)],
    ids=["batched", "small chunks", "preempted"],
)
def test_batching_chunking_preemption_and_prefix_reuse_never_change_an_output(
    loaded: LoadedModel,
    expected: dict[str, list[list[int]]],
    kind: str,
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
) -> None:
    engine = TinyEngine(loaded, num_blocks=num_blocks, max_num_seqs=max_num_seqs, budget=budget)
    names = [engine.ask(prompt, SAMPLINGS[kind]) for prompt in PROMPTS] + [
        engine.ask(prompt, SAMPLINGS[kind]) for prompt in PROMPTS
    ]
    engine.run()
    assert [engine.answers.tokens(name) for name in names] == expected[kind] * 2
    status = engine.core.status()
    is_small = num_blocks < 100
    assert (status.num_preemptions > 0) == is_small
    assert is_small or status.prompt_tokens_prefix_hit > 0
    assert status.num_blocks_in_use == 0


@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize("is_warm", [False, True], ids=["cold", "warm"])
def test_an_output_through_two_engines_equals_that_of_one(
    loaded: LoadedModel, expected: dict[str, list[list[int]]], kind: str, is_warm: bool
) -> None:
    prefill = TinyEngine(loaded)
    decode = TinyEngine(loaded, remote=prefill)
    first_token = dataclasses.replace(SAMPLINGS[kind], max_tokens=1, ignore_stops=True)
    if is_warm:
        for prompt in PROMPTS:
            decode.alone(prompt[: len(prompt) // 2 + 1], greedy(1))
    num_computed = decode.core.status().prompt_tokens_computed
    handed = [prefill.ask(prompt, first_token, hand_off=True) for prompt in PROMPTS]
    prefill.run()
    names = []
    for prompt, name in zip(PROMPTS, handed, strict=True):
        end = prefill.answers.end(name)
        assert end is not None
        assert end.finish is FinishReason.HANDED_OFF
        names.append(decode.ask(prompt, SAMPLINGS[kind], reference=end.handoff))
    decode.run()
    prefill.run()
    assert [decode.answers.tokens(name) for name in names] == expected[kind]
    status = decode.core.status()
    assert status.prompt_tokens_computed - num_computed == len(PROMPTS)
    assert (status.prompt_tokens_prefix_hit > 0) == is_warm
    assert prefill.core.status().num_blocks_in_use == 0
    assert prefill.core.status().num_leases_pinned == 0


def test_choices_through_two_engines_equal_those_of_one_and_share_one_pull(loaded: LoadedModel) -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=12, n=4)
    whole = TinyEngine(loaded)
    alone = whole.ask(prompt_of(21), params)
    whole.run()
    prefill = TinyEngine(loaded)
    decode = TinyEngine(loaded, remote=prefill)
    handed = prefill.ask(prompt_of(21), greedy(1), hand_off=True)
    prefill.run()
    end = prefill.answers.end(handed)
    assert end is not None
    name = decode.ask(prompt_of(21), params, reference=end.handoff)
    decode.run()
    outputs = [decode.answers.tokens(name, index) for index in range(4)]
    assert outputs == [whole.answers.tokens(alone, index) for index in range(4)]
    assert len({tuple(output) for output in outputs}) == 4
    assert decode.source is not None
    assert decode.source.num_pulled_tokens == 20
    assert decode.core.status().prompt_tokens_computed == 4


def test_prompt_logprobs_are_those_of_the_model(loaded: LoadedModel) -> None:
    prompt = prompt_of(30)
    chunked, whole = TinyEngine(loaded, budget=11), TinyEngine(loaded)
    values = []
    for engine in (chunked, whole):
        name = engine.ask(prompt, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=3, logprobs=0))
        engine.run()
        reported = engine.answers.deltas[name, 0][0].prompt_logprobs
        assert reported is not None
        values.append([entry.chosen.logprob for entry in reported if entry is not None])
    assert values[0] == pytest.approx(values[1], abs=1e-4)
    assert len(values[0]) == 29

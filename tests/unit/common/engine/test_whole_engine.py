"""The real decoder (tiny, random), the real sampler, the real cache: nothing the engine does to a batch shows in it."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from common.clock import ManualClock
from common.engine.core import EngineCore
from common.engine.kv_cache.storage import KvCacheStorage, KvShape
from common.engine.model.loaded import LoadedModel
from common.engine.request_state import FinishReason
from common.engine.sampling.params import SamplingParams
from common.engine.sampling.sampler import Sampler
from common.engine.settings import CoreSettings
from common.wire.kv_params import KvReference
from tests.support.fake_engine import MAX_STEPS, Answers, ask, greedy
from tests.support.fake_grammar import FakeGrammars
from tests.support.fake_kv import FakeSink, MemorySource
from tests.support.tiny_model import tiny_model

BLOCK_SIZE = 8


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model()


def storage_for(loaded: LoadedModel, num_blocks: int) -> KvCacheStorage:
    shape = KvShape(
        num_layers=loaded.config.num_layers,
        block_size=BLOCK_SIZE,
        num_kv_heads=loaded.config.num_kv_heads,
        head_dim=loaded.config.head_dim,
        dtype=torch.float32,
    )
    return KvCacheStorage(num_blocks, shape, torch.device("cpu"))


class Engine:
    """A core over the tiny model; P's storage and sink make it a D, a sink of its own a P."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_blocks: int = 256,
        max_num_seqs: int = 8,
        budget: int = 64,
        prefix_cache: bool = True,
        remote: "Engine | None" = None,
    ) -> None:
        self.storage = storage_for(loaded, num_blocks)
        self.sink = FakeSink(BLOCK_SIZE)
        self.source = None if remote is None else MemorySource(remote.sink, remote.storage, self.storage)
        settings = CoreSettings(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len_tokens=num_blocks * BLOCK_SIZE,
            eos_token_ids=frozenset(),
            enable_prefix_cache=prefix_cache,
        )
        self.core = EngineCore(
            settings,
            model=loaded.model,
            kv_cache=self.storage,
            sampler=Sampler(loaded.config.vocab_size, max_num_seqs, torch.device("cpu")),
            grammars=FakeGrammars(auto=True),
            clock=ManualClock(),
            kv_source=self.source,
            kv_sink=self.sink,
        )
        self.answers = Answers()
        self._num_asked = 0

    def ask(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        reference: KvReference | None = None,
        hand_off: bool = False,
    ) -> str:
        name = f"r{self._num_asked}"
        self._num_asked += 1
        request = ask(name, prompt, sampling, reference=reference, hand_off=hand_off)
        self.core.check(request)
        self.core.add(request)
        return name

    def run(self) -> None:
        for _ in range(MAX_STEPS):
            result = self.core.step()
            self.answers.take(result.deltas)
            if not result.did_work and not (self.source and self.source.outcomes):
                self.core.kv.check_integrity()
                return
        raise AssertionError("the engine never came to rest")

    def alone(self, prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
        name = self.ask(prompt, sampling)
        self.run()
        return self.answers.tokens(name)


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
    engine = Engine(loaded, budget=128, prefix_cache=False)
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
    engine = Engine(loaded, num_blocks=num_blocks, max_num_seqs=max_num_seqs, budget=budget)
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
    prefill = Engine(loaded)
    decode = Engine(loaded, remote=prefill)
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
    whole = Engine(loaded)
    alone = whole.ask(prompt_of(21), params)
    whole.run()
    prefill = Engine(loaded)
    decode = Engine(loaded, remote=prefill)
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
    chunked, whole = Engine(loaded, budget=11), Engine(loaded)
    values = []
    for engine in (chunked, whole):
        name = engine.ask(prompt, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=3, logprobs=0))
        engine.run()
        reported = engine.answers.deltas[name, 0][0].prompt_logprobs
        assert reported is not None
        values.append([entry.chosen.logprob for entry in reported if entry is not None])
    assert values[0] == pytest.approx(values[1], abs=1e-4)
    assert len(values[0]) == 29

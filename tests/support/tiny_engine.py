"""A core over a tiny real decoder and the real sampler, for tests of the whole engine."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from common.clock import ManualClock
from common.engine.core import EngineCore
from common.engine.kv_cache.storage import KvCacheStorage, KvShape
from common.engine.model.loaded import LoadedModel
from common.engine.sampling.params import SamplingParams
from common.engine.sampling.processors.loading import build_processors
from common.engine.sampling.processors.processor import LogitsProcessor, ProcessorContext
from common.engine.sampling.processors.thinking_budget import OutputMarkers
from common.engine.sampling.sampler import Sampler
from common.engine.settings import CoreSettings
from common.engine.structured_output.grammar import GrammarService
from common.engine.structured_output.thinking import Thinking
from common.wire.constraint import Constraint
from common.wire.kv_params import KvReference
from tests.support.fake_engine import MAX_STEPS, Answers, ask
from tests.support.fake_grammar import FakeGrammars
from tests.support.fake_kv import FakeSink, MemorySource

BLOCK_SIZE = 8


def storage_for(loaded: LoadedModel, num_blocks: int) -> KvCacheStorage:
    shape = KvShape(
        num_layers=loaded.config.num_layers,
        block_size=BLOCK_SIZE,
        num_kv_heads=loaded.config.num_kv_heads,
        head_dim=loaded.config.head_dim,
        dtype=torch.float32,
    )
    return KvCacheStorage(num_blocks, shape, torch.device("cpu"))


class TinyEngine:
    """A core over the tiny model; P's storage and sink make it a D, a sink of its own a P."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_blocks: int = 256,
        max_num_seqs: int = 8,
        budget: int = 64,
        prefix_cache: bool = True,
        remote: "TinyEngine | None" = None,
        grammars: GrammarService | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        processors: Sequence[type[LogitsProcessor]] = (),
        markers: OutputMarkers | None = None,
    ) -> None:
        self.storage = storage_for(loaded, num_blocks)
        self.sink = FakeSink(BLOCK_SIZE)
        self.source = None if remote is None else MemorySource(remote.sink, remote.storage, self.storage)
        settings = CoreSettings(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len_tokens=num_blocks * BLOCK_SIZE,
            eos_token_ids=eos_token_ids,
            enable_prefix_cache=prefix_cache,
        )
        device, width = torch.device("cpu"), loaded.config.vocab_size
        built = build_processors(processors, ProcessorContext(vocab_size=width, max_rows=max_num_seqs, device=device))
        self.core = EngineCore(
            settings,
            model=loaded.model,
            kv_cache=self.storage,
            sampler=Sampler(width, max_num_seqs, device, processors=built, markers=markers),
            grammars=grammars or FakeGrammars(auto=True),
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
        constraint: Constraint | None = None,
        thinking: Thinking = Thinking.NONE,
    ) -> str:
        name = f"r{self._num_asked}"
        self._num_asked += 1
        request = ask(name, prompt, sampling, constraint=constraint, reference=reference, hand_off=hand_off)
        request = replace(request, thinking=thinking)
        self.core.check(request)
        self.core.add(request, self.core.compile(request))
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

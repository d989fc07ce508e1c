"""An `EngineCore` over fakes, and what its answers add up to."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from common.clock import ManualClock
from common.config.engine import SpeculativeConfig
from common.engine.core import EngineCore
from common.engine.kv_cache.storage import KvCacheStorage
from common.engine.outputs import TokenDelta
from common.engine.ports import KVSink, KVSource
from common.engine.request import GenerateRequest
from common.engine.request_state import FinishReason
from common.engine.sampling.params import SamplingParams
from common.engine.settings import CoreSettings
from common.ids import RequestId
from common.telemetry.timeline import Event, Timeline
from common.wire.constraint import Constraint
from common.wire.kv_params import KvReference
from tests.support.fake_grammar import FakeGrammars
from tests.support.fake_kv import FakeSink, FakeSource
from tests.support.fake_model import EOS, FakeModel, fake_storage
from tests.support.fake_sampler import GreedySampler

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, seed=1)
MAX_STEPS = 2000


def greedy(max_tokens: int = 8, **changes: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, seed=1, max_tokens=max_tokens, **changes)  # type: ignore[arg-type]  # named


def ask(
    request_id: str,
    prompt: Sequence[int],
    sampling: SamplingParams = GREEDY,
    *,
    clock: ManualClock | None = None,
    constraint: Constraint | None = None,
    reference: KvReference | None = None,
    hand_off: bool = False,
) -> GenerateRequest:
    timeline = Timeline(clock or ManualClock())
    timeline.mark(Event.RECEIVED)
    return GenerateRequest(
        request_id=RequestId(request_id),
        prompt_token_ids=tuple(prompt),
        sampling=sampling,
        timeline=timeline,
        constraint=constraint,
        reference=reference,
        hand_off=hand_off,
    )


@dataclass
class Answers:
    """Everything a core said, by (request id, choice)."""

    deltas: dict[tuple[str, int], list[TokenDelta]] = field(default_factory=dict)

    def take(self, deltas: Iterable[TokenDelta]) -> None:
        for delta in deltas:
            said = self.deltas.setdefault((delta.request_id, delta.index), [])
            assert not said or said[-1].finish is None, f"{delta.request_id} spoke after its end"
            said.append(delta)

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        return [token for delta in self.deltas.get((request_id, index), []) for token in delta.token_ids]

    def end(self, request_id: str, index: int = 0) -> TokenDelta | None:
        said = self.deltas.get((request_id, index), [])
        return said[-1] if said and said[-1].finish is not None else None

    def finish(self, request_id: str, index: int = 0) -> FinishReason | None:
        end = self.end(request_id, index)
        return None if end is None else end.finish


@dataclass
class FakeEngine:
    """A core, its fakes, and its answers so far."""

    core: EngineCore
    storage: KvCacheStorage
    model: FakeModel
    sampler: GreedySampler
    grammars: FakeGrammars
    source: FakeSource
    sink: FakeSink
    clock: ManualClock
    answers: Answers = field(default_factory=Answers)

    def step(self) -> bool:
        """One step; whether it did anything."""
        self.clock.advance(0.001)
        result = self.core.step()
        self.answers.take(result.deltas)
        self.core.kv.check_integrity()
        return result.did_work

    def run(self) -> None:
        """Step until nothing happens any more."""
        for _ in range(MAX_STEPS):
            if not self.step():
                return
        raise AssertionError("the engine never came to rest")

    def add(self, request: GenerateRequest) -> None:
        self.core.check(request)
        self.core.add(request, self.core.compile(request))


def make_engine(
    num_blocks: int = 64,
    block_size: int = 4,
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 16,
    enable_prefix_cache: bool = True,
    on_pull_failure: str = "recompute",
    auto: bool = True,
    kv_source: KVSource | None = None,
    kv_sink: KVSink | None = None,
    speculation: SpeculativeConfig | None = None,
    model: FakeModel | None = None,
) -> FakeEngine:
    """A core over `FakeModel`; with `auto` grammars and pulls settle at once."""
    clock, storage, sampler = ManualClock(), fake_storage(num_blocks, block_size), GreedySampler()
    model = model or FakeModel()
    grammars, source, sink = FakeGrammars(auto=auto), FakeSource(storage, auto=auto), FakeSink(block_size)
    settings = CoreSettings(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len_tokens=num_blocks * block_size,
        eos_token_ids=frozenset({EOS}),
        enable_prefix_cache=enable_prefix_cache,
        on_pull_failure=on_pull_failure,  # type: ignore[arg-type]  # one of the two words
        speculation=speculation,
    )
    core = EngineCore(
        settings,
        model=model,
        kv_cache=storage,
        sampler=sampler,
        grammars=grammars,
        clock=clock,
        kv_source=kv_source or source,
        kv_sink=kv_sink or sink,
    )
    return FakeEngine(core, storage, model, sampler, grammars, source, sink, clock)

"""The whole of P/D in this process: our proxy, and our engines' HTTP server, step loop, scheduler and cache behind it.

Only what costs time is fake: a model whose prompt steps sleep, grammars whose compilation takes as long as told, KV
that is copied between the two pools. Each engine has a step loop of its own, and legs go over real sockets.
"""

import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import aiohttp
import msgspec
import torch

from common.clock import ManualClock, SystemClock
from common.engine.async_engine import AsyncEngine
from common.engine.chat_template import ChatTemplate
from common.engine.core import EngineCore
from common.engine.kv_cache.storage import KvCacheStorage
from common.engine.model.forward import ForwardBatch
from common.engine.ports import KVSink, KVSource, PullPlan
from common.engine.sampling.raw import SamplingContext
from common.engine.settings import CoreSettings
from common.engine.structured_output.grammar import CompileState, GrammarService, GrammarTicket
from common.serving.app import AppSettings, build_app
from common.serving.assembly import EngineWake
from common.serving.intake import Intake
from common.serving.kv_intent import KvGate
from common.serving.respond import Responder
from common.serving.sampling_fields import SamplingReader
from common.serving.served_model import ServedModel
from common.serving.server import HttpServer
from common.serving.surface import Parts, Surface
from common.serving.tracing import EngineTraces
from common.telemetry.metrics import Metrics
from common.tracing.exporter import Collector, TraceExporter
from common.wire.constraint import Constraint
from proxy.config import FleetConfig, ProxyConfig
from proxy.server import running
from tests.support.byte_tokenizer import ByteTokenizer
from tests.support.fake_grammar import FakeGrammars, FakeTicket
from tests.support.fake_kv import FakeSink, MemorySource
from tests.support.fake_model import EOS, FakeModel, fake_storage
from tests.support.fake_sampler import GreedySampler
from tests.support.proxy_rig import FAST_PROBES
from tests.support.serving_rig import RecordingKvControl, RecordingReferences

BLOCK_SIZE, NUM_BLOCKS = 16, 64
CONTEXT_TOKENS = BLOCK_SIZE * NUM_BLOCKS
FIRST_MESSAGE = "{{ messages[0].content }}"
YEARS = {"prefill": 1999, "decode": 2042}
"""The year that each role's chat template is told."""


class SlowModel(FakeModel):
    """A step with more than one token of a sequence in it, i.e. of a prompt, takes `prompt_step_s`."""

    def __init__(self, prompt_step_s: float) -> None:
        super().__init__()
        self._prompt_step_s = prompt_step_s

    def forward(self, batch: ForwardBatch, kv_cache: torch.Tensor) -> torch.Tensor:
        starts = batch.query_start
        if any(int(end) - int(start) > 1 for start, end in itertools.pairwise(starts)):
            time.sleep(self._prompt_step_s)
        return super().forward(batch, kv_cache)


@dataclass
class SlowGrammars(FakeGrammars):
    """A constraint that was never seen takes `compile_s`, on a thread of its own; then it is cached."""

    compile_s: float = 0.0
    num_compiled: int = 0
    known: dict[tuple[Any, ...], FakeTicket] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def compile(self, constraint: Constraint) -> GrammarTicket:
        with self.lock:
            ticket = self.known.get(constraint.key)
            if ticket is None:
                ticket = self.known[constraint.key] = SettledOnce(constraint)
                self.num_compiled += 1
                threading.Timer(self.compile_s, ticket.settle).start()
        return ticket


@dataclass
class SettledOnce(FakeTicket):
    """A `FakeTicket` that is settled on one thread and asked on others."""

    lock: threading.Lock = field(default_factory=threading.Lock)

    def settle(self, error: Any = None) -> None:
        with self.lock:
            super().settle(error)

    def on_settled(self, callback: Callable[[], None]) -> None:
        with self.lock:
            is_settled = self.state is not CompileState.COMPILING
            if not is_settled:
                self.callbacks.append(callback)
        if is_settled:
            callback()


@dataclass
class WakingSource(MemorySource):
    """A `MemorySource` whose engine is told when a pull is over."""

    wake: Callable[[], None] = lambda: None

    def start_pull(self, plan: PullPlan) -> None:
        super().start_pull(plan)
        self.wake()


@dataclass
class Engine:
    """One engine behind its HTTP server."""

    url: str
    grammars: SlowGrammars
    model: SlowModel
    storage: KvCacheStorage


@dataclass
class PdRig:
    """P, D, a proxy, and a client for it."""

    p: Engine
    d: Engine
    url: str
    session: aiohttp.ClientSession
    exporters: list[TraceExporter]

    async def timeline(self, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Text and timeline of a streamed completion."""
        asked = {"model": "m", "temperature": 0, "stream": True, "timeline": True, **body}
        async with self.session.post(f"{self.url}/v1/completions", json=asked) as response:
            text = (await response.read()).decode()
            assert response.status == 200, text
        events = [msgspec.json.decode(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        said = "".join(choice["text"] for event in events for choice in event["choices"])
        return said, next(event["timeline"] for event in events if "timeline" in event)


@asynccontextmanager
async def pd_rig(
    *,
    prefill_s: float,
    compile_s: float,
    collector: Collector | None = None,
    template: str = FIRST_MESSAGE,
    **proxy: Any,
) -> AsyncIterator[PdRig]:
    """A started rig; `proxy` are keys of `proxy:` as in the file; `collector` gets the engines' spans.

    `template` is the model's, as it is on P and on D; they live in different years (`YEARS`).
    """
    async with AsyncExitStack() as stack:
        sink, p_storage, d_storage = FakeSink(BLOCK_SIZE), *(fake_storage(NUM_BLOCKS, BLOCK_SIZE) for _ in "PD")
        wake = EngineWake()
        source = WakingSource(sink, p_storage, d_storage, wake=wake)
        start = _Start(stack, prefill_s, compile_s, collector, template)
        p = await start.engine("prefill", p_storage, EngineWake(), sink=sink)
        d = await start.engine("decode", d_storage, wake, source=source)
        fleet = msgspec.convert({"prefill": [p.url], "decode": [d.url], **FAST_PROBES}, FleetConfig)
        config = msgspec.convert({"port": 0, "drain_s": 1.0, **proxy}, ProxyConfig)
        runs = await stack.enter_async_context(running(msgspec.structs.replace(config, fleet=fleet), SystemClock()))
        await runs.services.fleet.wait_ready()
        session = await stack.enter_async_context(aiohttp.ClientSession())
        traces = runs.services.traces
        exporters = [*start.exporters, *([] if traces is None else [traces])]
        yield PdRig(p, d, f"http://127.0.0.1:{runs.port}", session, exporters)


@dataclass
class _Start:
    stack: AsyncExitStack
    prefill_s: float
    compile_s: float
    collector: Collector | None
    template: str
    exporters: list[TraceExporter] = field(default_factory=list)

    async def engine(
        self,
        role: str,
        storage: KvCacheStorage,
        wake: EngineWake,
        *,
        source: KVSource | None = None,
        sink: KVSink | None = None,
    ) -> Engine:
        """One engine, serving."""
        model, grammars = SlowModel(self.prefill_s), SlowGrammars(compile_s=self.compile_s)
        core = EngineCore(
            CoreSettings(
                max_num_seqs=8,
                max_num_batched_tokens=CONTEXT_TOKENS,
                max_model_len_tokens=CONTEXT_TOKENS,
                eos_token_ids=frozenset({EOS}),
            ),
            model=model,
            kv_cache=storage,
            sampler=GreedySampler(),
            grammars=grammars,
            clock=SystemClock(),
            kv_source=source,
            kv_sink=sink,
        )
        engine = AsyncEngine(core, SystemClock())
        wake.bind(engine.wake)
        await engine.start()
        self.stack.push_async_callback(engine.close)
        surface, metrics = Surface(), Metrics()
        tokenizer = ByteTokenizer(frozenset({EOS}))
        context = SamplingContext(
            tokenizer=tokenizer, vocab_size=tokenizer.vocab_size, max_model_len_tokens=CONTEXT_TOKENS
        )
        template = ChatTemplate(self.template, {}, ManualClock(seconds_until(YEARS[role])))
        surface.open(engine_parts(engine, grammars, metrics, context, is_prefill=sink is not None, template=template))
        app = build_app(surface, metrics, AppSettings(role=role, engine_id=role), self._traces(role))
        server = HttpServer(app, "127.0.0.1", 0, 1.0)
        await server.start()
        self.stack.push_async_callback(server.close)
        return Engine(f"http://127.0.0.1:{server.port}", grammars, model, storage)

    def _traces(self, role: str) -> EngineTraces | None:
        if self.collector is None:
            return None
        exporter = TraceExporter(self.collector, f"pd-{role}", SystemClock())
        self.exporters.append(exporter)
        return EngineTraces(role, exporter, SystemClock())


def seconds_until(year: int) -> float:
    """Wall-clock seconds in the middle of `year`."""
    return datetime(year, 7, 1).timestamp()


def engine_parts(
    engine: AsyncEngine,
    grammars: GrammarService,
    metrics: Metrics,
    context: SamplingContext,
    *,
    is_prefill: bool,
    template: ChatTemplate | None = None,
) -> Parts:
    """What an engine of a rig serves with: P hands off, D takes unsigned references."""
    clock = SystemClock()
    model = ServedModel(
        name="m",
        root="m.gguf",
        created_s=0,
        max_model_len_tokens=context.max_model_len_tokens,
        tokenizer=context.tokenizer,
        chat_template=template or ChatTemplate(FIRST_MESSAGE, {}, clock),
    )
    gate = KvGate(None if is_prefill else Unsigned(), hands_off=is_prefill)
    return Parts(
        model=model,
        engine=engine,
        kv=gate,
        intake=Intake(model, SamplingReader(context), grammars, clock),
        responder=Responder(gate.guard(engine), model, metrics),
        grammars=grammars,
        clock=clock,
        is_alive=lambda: engine.status().is_alive,
        kv_control=RecordingKvControl() if is_prefill else None,
    )


class Unsigned(RecordingReferences):
    """Believes every reference."""

    def admit(self, reference: Any) -> Any:
        return reference


def regex(num_tokens: int, allowed: str, number: int) -> dict[str, Any]:
    """A constraint that the fake grammars understand: `num_tokens` characters out of `allowed`; `number` makes it new.

    The last character is repeated `number` times, so that all of these spell the same language.
    """
    tokens = [ord(character) for character in (*allowed, *allowed[-1:] * number)]
    return {"structured_outputs": {"regex": ",".join(map(str, (num_tokens, *tokens)))}}

"""P/D in one process with a real decoder, sampler and grammars: the same body to the proxy, and to one plain engine.

D checks drafts, five tokens at a time; the plain engine computes one token after the other.

Legs go over real sockets through our proxy and HTTP servers; only the KV is copied in memory. `vllm_xargs: {"script":
text}` makes the model say `text` byte by byte (as strong wishes: masks and a thinking budget still win).
"""

import io
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import torch

from common.clock import SystemClock
from common.config.engine import SpeculativeConfig
from common.engine.async_engine import AsyncEngine
from common.engine.core import EngineCore
from common.engine.kv_cache.storage import KvCacheStorage
from common.engine.model.loaded import LoadedModel
from common.engine.ports import KVSink, KVSource
from common.engine.sampling.params import SamplingParams
from common.engine.sampling.processors.loading import build_processors
from common.engine.sampling.processors.processor import PerRequestProcessor, ProcessorContext, RowCallable
from common.engine.sampling.processors.thinking_budget import OutputMarkers
from common.engine.sampling.raw import SamplingContext
from common.engine.sampling.sampler import Sampler
from common.engine.settings import CoreSettings
from common.serving.app import AppSettings, build_app
from common.serving.assembly import EngineWake
from common.serving.server import HttpServer
from common.serving.surface import Surface
from common.telemetry.metrics import Metrics
from proxy.config import FleetConfig, ProxyConfig
from proxy.server import running
from tests.support.byte_tokenizer import EOS_TOKEN_ID, ByteTokenizer
from tests.support.fake_kv import FakeSink
from tests.support.grammars import make_service
from tests.support.pd_rig import WakingSource, engine_parts
from tests.support.proxy_rig import FAST_PROBES
from tests.support.tiny_engine import BLOCK_SIZE, storage_for
from tests.support.tiny_model import tiny_model

NUM_BLOCKS = 64
CONTEXT_TOKENS = BLOCK_SIZE * NUM_BLOCKS
SECOND_EOS = 258
"""`<|pad|>` ends an output here, too: a model with two EOS ids."""
EOS_IDS = frozenset({EOS_TOKEN_ID, SECOND_EOS})
THINK, END_THINK = 259, 260
DRAFTS = SpeculativeConfig(
    method="grammar+ngram", num_speculative_tokens=5, prompt_lookup_min=1, disable_by_batch_size=16
)
TOOL_START, TOOL_END = b"<t>", b"</t>"
MARKERS = OutputMarkers(
    think_start=(THINK,), think_end=(END_THINK,), tool_start=tuple(TOOL_START), tool_end=tuple(TOOL_END)
)


class SayScript(PerRequestProcessor):
    """Adds 1000 to the logit of the script's next token; special tokens are written as their text."""

    def new_request(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> RowCallable | None:
        script = params.extra_args.get("script")
        if not isinstance(script, str):
            return None
        tokens = ByteTokenizer().encode(script)

        def wish(output: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
            if len(output) < len(tokens):
                logits[tokens[len(output)]] += 1000.0
            return logits

        return wish


@dataclass
class Choice:
    """One choice as a client puts it together, from an answer in one piece or from chunks."""

    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    top: list[Any] = field(default_factory=list)

    def take(self, said: dict[str, Any]) -> None:
        """Add a choice of an answer or of a chunk."""
        part = said.get("message") or said.get("delta") or {}
        self.text += said.get("text") or part.get("content") or ""
        self.finish_reason = said.get("finish_reason") or self.finish_reason
        self.stop_reason = said.get("stop_reason") if self.stop_reason is None else self.stop_reason
        reported = said.get("logprobs") or {}
        self.tokens += reported.get("tokens") or [entry["token"] for entry in reported.get("content") or ()]
        self.logprobs += reported.get("token_logprobs") or [entry["logprob"] for entry in reported.get("content") or ()]
        self.top += reported.get("top_logprobs") or [entry["top_logprobs"] for entry in reported.get("content") or ()]


@dataclass(frozen=True)
class Answer:
    """What came back; `choices` by index. `whole` is the body of an answer in one piece."""

    status: int
    choices: list[Choice]
    error: dict[str, Any] | None
    whole: dict[str, Any]

    @property
    def choice(self) -> Choice:
        """The only one."""
        (choice,) = self.choices
        return choice


@dataclass
class Engine:
    """One engine and its address."""

    url: str
    engine: AsyncEngine


@dataclass
class SamplingRig:
    """P, D, a proxy, one engine that does everything alone, and a client."""

    p: Engine
    d: Engine
    alone: Engine
    sink: FakeSink
    url: str
    session: aiohttp.ClientSession

    async def ask(
        self, body: dict[str, Any], *, split: bool, stream: bool = False, path: str = "/v1/completions"
    ) -> Answer:
        """The answer to `body`, through the proxy when `split`, else from one engine alone."""
        asked = {"model": "m", "stream": stream, **body}
        url, data = self.url if split else self.alone.url, io.BytesIO(msgspec.json.encode(asked))
        async with self.session.post(f"{url}{path}", data=data) as response:
            raw, status = await response.read(), response.status
        if status != 200 or not stream:
            whole = msgspec.json.decode(raw)
            return _answer(status, [whole])
        lines = [line[6:] for line in raw.decode().splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]", "the stream never ended"
        return _answer(status, [msgspec.json.decode(line) for line in lines[:-1]])


def _answer(status: int, events: list[dict[str, Any]]) -> Answer:
    choices: dict[int, Choice] = {}
    error = next((event["error"] for event in events if event.get("error")), None)
    for event in events:
        for said in event.get("choices", ()):
            choices.setdefault(said["index"], Choice()).take(said)
    return Answer(status, [choices[index] for index in sorted(choices)], error, events[-1])


@asynccontextmanager
async def sampling_rig() -> AsyncIterator[SamplingRig]:
    """A started rig."""
    async with AsyncExitStack() as stack:
        loaded = tiny_model(ByteTokenizer().vocab_size)
        p_storage, d_storage, alone_storage = (storage_for(loaded, NUM_BLOCKS) for _ in range(3))
        sink, wake = FakeSink(BLOCK_SIZE), EngineWake()
        source = WakingSource(sink, p_storage, d_storage, wake=wake)
        p = await _engine(stack, loaded, p_storage, EngineWake(), sink=sink)
        d = await _engine(stack, loaded, d_storage, wake, source=source, speculation=DRAFTS)
        alone = await _engine(stack, loaded, alone_storage, EngineWake())
        fleet = msgspec.convert({"prefill": [p.url], "decode": [d.url], **FAST_PROBES}, FleetConfig)
        config = msgspec.convert({"port": 0, "drain_s": 1.0}, ProxyConfig)
        runs = await stack.enter_async_context(running(msgspec.structs.replace(config, fleet=fleet), SystemClock()))
        await runs.services.fleet.wait_ready()
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield SamplingRig(p, d, alone, sink, f"http://127.0.0.1:{runs.port}", session)


async def _engine(
    stack: AsyncExitStack,
    loaded: LoadedModel,
    storage: KvCacheStorage,
    wake: EngineWake,
    *,
    source: KVSource | None = None,
    sink: KVSink | None = None,
    speculation: SpeculativeConfig | None = None,
) -> Engine:
    """One engine, serving."""
    device, width, max_rows = torch.device("cpu"), loaded.config.vocab_size, 16
    built = build_processors([SayScript], ProcessorContext(vocab_size=width, max_rows=max_rows, device=device))
    grammars = make_service()
    stack.callback(grammars.close)
    core = EngineCore(
        CoreSettings(
            max_num_seqs=max_rows,
            max_num_batched_tokens=64,
            max_model_len_tokens=CONTEXT_TOKENS,
            eos_token_ids=EOS_IDS,
            speculation=speculation,
        ),
        model=loaded.model,
        kv_cache=storage,
        sampler=Sampler(width, max_rows, device, processors=built, markers=MARKERS),
        grammars=grammars,
        clock=SystemClock(),
        kv_source=source,
        kv_sink=sink,
    )
    engine = AsyncEngine(core, SystemClock())
    wake.bind(engine.wake)
    await engine.start()
    stack.push_async_callback(engine.close)
    surface, metrics = Surface(), Metrics()
    role = "decode" if sink is None else "prefill"
    tokenizer = ByteTokenizer(EOS_IDS)
    context = SamplingContext(
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size,
        max_model_len_tokens=CONTEXT_TOKENS,
        has_thinking=True,
        processors=(SayScript,),
    )
    surface.open(engine_parts(engine, grammars, metrics, context, is_prefill=sink is not None))
    server = HttpServer(build_app(surface, metrics, AppSettings(role=role, engine_id=role)), "127.0.0.1", 0, 1.0)
    await server.start()
    stack.push_async_callback(server.close)
    return Engine(f"http://127.0.0.1:{server.port}", engine)

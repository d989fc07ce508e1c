"""The engines' HTTP server over real sockets with a scripted engine behind it: no model, no step loop."""

import asyncio
import io
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from common.clock import ManualClock
from common.engine.chat_template import ChatTemplate
from common.engine.outputs import PositionLogprobs, TokenDelta, TokenLogprob
from common.engine.request import GenerateRequest
from common.engine.request_state import FinishReason
from common.engine.sampling.raw import SamplingContext
from common.engine.structured_output.grammar import GrammarTicket
from common.engine.structured_output.ticket import Ticket
from common.errors import ConstraintRejected, PDError, ReferenceRefused
from common.ids import BlockId, EngineId, LeaseId, RequestId
from common.openai.sse import SseParser
from common.openai.tool_calls import ToolTags
from common.serving.app import AppSettings, build_app
from common.serving.final_check import FinalCheck
from common.serving.intake import Intake
from common.serving.kv_intent import KvGate
from common.serving.respond import Responder
from common.serving.sampling_fields import SamplingReader
from common.serving.served_model import ServedModel
from common.serving.server import HttpServer
from common.serving.shaping.reasoning import ReasoningTags
from common.serving.surface import Parts, Surface
from common.telemetry.metrics import Metrics
from common.telemetry.timeline import Event
from common.wire.constraint import Constraint
from common.wire.kv_params import KvReference
from tests.support.byte_tokenizer import EOS_TOKEN_ID, ByteTokenizer
from tests.support.fake_grammar import FakeGrammars

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if tools %}[tools]{{ tools | tojson }}\n{% endif %}"
    "{% if response_format %}[format]{{ response_format.type }}\n{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
REFERENCE = KvReference(
    remote_engine_id=EngineId("p-1"),
    remote_request_id=RequestId("r-1"),
    remote_host="127.0.0.1",
    remote_port=8100,
    remote_block_ids=(BlockId(3), BlockId(4)),
    remote_num_tokens=20,
    block_size=16,
    lease_id=LeaseId("lease-1"),
    lease_ttl_s=30.0,
    prompt_token_ids=tuple(b"twenty prompt tokens"),
    signature="signed",
)


@dataclass
class ScriptedEngine:
    """Implements `common.serving.ports.Engine`: says `text`, byte by byte, then stops.

    Attributes:
        text: of every choice; or of each choice in turn.
        fail_after: tokens before `error` ends a request; None never.
        gate: when set, tokens after the first wait for it.
        refuses: raised by `submit`.
        ended_choices: indices that their reader ended before the engine did.
        step_s: what each token after the first takes.
    """

    clock: ManualClock
    text: str | Sequence[str] = "Hello"
    fail_after: int | None = None
    error: PDError | None = None
    gate: asyncio.Event | None = None
    refuses: PDError | None = None
    step_s: float = 0.0
    is_alive: bool = True
    requests: list[GenerateRequest] = field(default_factory=list)
    left: list[RequestId] = field(default_factory=list)
    ended_choices: list[int] = field(default_factory=list)
    arrivals: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    departures: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))

    def submit(self, request: GenerateRequest) -> "ScriptedStream":
        if self.refuses is not None:
            raise self.refuses
        self.requests.append(request)
        self.arrivals.release()
        for event in (Event.ADMITTED, Event.SCHEDULED):
            self.clock.advance(0.25)
            request.timeline.mark(event)
        return ScriptedStream(self, request, self._deltas(request))

    def text_of(self, choice: int) -> bytes:
        texts = [self.text] if isinstance(self.text, str) else self.text
        return texts[choice % len(texts)].encode()

    def _deltas(self, request: GenerateRequest) -> list[TokenDelta]:
        if request.hand_off:
            delta = self._delta(request, 0, 88, first=True)
            return [msgspec.structs.replace(delta, finish=FinishReason.HANDED_OFF, handoff=REFERENCE)]
        per_choice = [self._choice(request, index) for index in range(request.sampling.n)]
        longest = max(map(len, per_choice))
        return [deltas[step] for step in range(longest) for deltas in per_choice if step < len(deltas)]

    def _choice(self, request: GenerateRequest, index: int) -> list[TokenDelta]:
        tokens = list(self.text_of(len(self.requests) - 1 + index))
        limit = request.sampling.max_tokens
        deltas = [self._delta(request, index, token, first=place == 0) for place, token in enumerate(tokens[:limit])]
        if self.fail_after is not None:
            failed = TokenDelta(request_id=request.request_id, index=index, finish=FinishReason.ERROR, error=self.error)
            return [*deltas[: self.fail_after], failed]
        if len(tokens) < limit:
            end = self._delta(request, index, EOS_TOKEN_ID, first=not tokens)
            return [*deltas, msgspec.structs.replace(end, finish=FinishReason.STOP)]
        deltas[-1] = msgspec.structs.replace(deltas[-1], finish=FinishReason.LENGTH)
        return deltas

    def _delta(self, request: GenerateRequest, index: int, token: int, *, first: bool) -> TokenDelta:
        prompt = None
        if first and index == 0 and request.sampling.prompt_logprobs is not None:
            prompt = (None, *(position(token_id, 1) for token_id in request.prompt_token_ids[1:]))
        num = request.sampling.logprobs
        return TokenDelta(
            request_id=request.request_id,
            index=index,
            token_ids=(token,),
            logprobs=() if num is None else (position(token, num),),
            prompt_logprobs=prompt,
            num_cached_tokens=4 if first else 0,
        )


def position(token_id: int, num_top: int) -> PositionLogprobs:
    """The chosen token at -0.5, alternatives below, the last of them impossible."""
    top = [TokenLogprob(token_id=token_id, logprob=-0.5, rank=1)]
    top += [TokenLogprob(token_id=97 + i, logprob=float("-inf"), rank=2 + i) for i in range(num_top - 1)]
    return PositionLogprobs(chosen=top[0], top=tuple(top[:num_top]))


class ScriptedStream:
    def __init__(self, engine: ScriptedEngine, request: GenerateRequest, deltas: list[TokenDelta]) -> None:
        self._engine = engine
        self._request = request
        self._deltas = deltas
        self._num_given = 0

    async def __aenter__(self) -> "ScriptedStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._deltas:
            self._engine.left.append(self._request.request_id)
            self._engine.departures.release()

    async def next(self) -> TokenDelta:
        if self._num_given and self._engine.gate is not None:
            await self._engine.gate.wait()
        self._num_given += 1
        if self._num_given == 1:
            self._engine.clock.advance(0.5)
            self._request.timeline.mark(Event.FIRST_TOKEN)
        else:
            self._engine.clock.advance(self._engine.step_s)
        return self._deltas.pop(0)

    def end_choice(self, index: int) -> None:
        self._engine.ended_choices.append(index)
        ended = TokenDelta(request_id=self._request.request_id, index=index, finish=FinishReason.ABORTED)
        self._deltas = [ended, *(delta for delta in self._deltas if delta.index != index)]


@dataclass
class RecordingReferences:
    """Implements `common.serving.ports.References`."""

    admits: Callable[[KvReference], KvReference | None] = lambda reference: reference
    refused: list[KvReference] = field(default_factory=list)

    def admit(self, reference: KvReference) -> KvReference | None:
        if reference.signature != "signed":
            raise ReferenceRefused("the signature of the reference is wrong")
        return self.admits(reference)

    def refuse(self, reference: KvReference) -> None:
        self.refused.append(reference)


@dataclass
class DoorGrammars(FakeGrammars):
    """Settles at once; refuses constraints that say `nonsense`: at the door in EBNF, by the compiler elsewhere."""

    auto: bool = True

    def check(self, constraint: Constraint) -> None:
        if constraint.value == "nonsense":
            raise ConstraintRejected("nonsense at the door", constraint.field)

    def compile(self, constraint: Constraint):
        ticket = super().compile(constraint)
        if "nonsense" in constraint.value:
            ticket.error = ConstraintRejected("nonsense does not compile", constraint.field)
            ticket.state = type(ticket.state).FAILED
        ticket.compile_s = 0.0125
        return ticket


@dataclass
class InexactGrammars:
    """Implements `common.serving.final_check.InexactGrammars`: leaves `oneOf` out; a text must hold `}`."""

    def compile(self, constraint: Constraint) -> Ticket:
        ticket = Ticket(constraint, 0.0)
        ticket.succeed(None, "fake", 0.0, ("oneOf",) if "oneOf" in constraint.value else ())
        return ticket

    def why_invalid(self, ticket: GrammarTicket, text: str) -> str | None:
        return None if text.startswith("{") else f"{text} is no object"


@dataclass(frozen=True)
class Reply:
    status: int
    body: bytes


@dataclass
class RecordingKvControl:
    """Implements `common.serving.ports.KvControl`."""

    released: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)

    def handshake_offer(self) -> Reply:
        return Reply(200, b'{"engine_id":"p-1"}')

    def handshake_answer(self, body: bytes) -> Reply:
        return Reply(409, b'{"cause":"incompatible"}')

    def release(self, lease_id: LeaseId) -> bool:
        self.released.append(lease_id)
        return lease_id == "lease-1"

    def cancel_request(self, request_id: RequestId) -> None:
        self.cancelled.append(request_id)


@dataclass
class Rig:
    """A running server and a client for it."""

    engine: ScriptedEngine
    surface: Surface
    metrics: Metrics
    url: str
    session: aiohttp.ClientSession
    references: RecordingReferences
    grammars: DoorGrammars
    kv_control: RecordingKvControl

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> "Answered":
        # A file object: the client warns of large bodies given as bytes.
        data = io.BytesIO(body if isinstance(body, bytes) else msgspec.json.encode(body))
        async with self.session.post(self.url + path, data=data, headers=headers) as response:
            return Answered(response.status, response.headers, await response.read())

    async def get(self, path: str) -> "Answered":
        async with self.session.get(self.url + path) as response:
            return Answered(response.status, response.headers, await response.read())


@dataclass(frozen=True)
class Answered:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def events(self) -> list[Any]:
        """Decoded events; the end marker as the string `[DONE]`."""
        payloads = SseParser().push(self.body)
        return ["[DONE]" if payload == b"[DONE]" else msgspec.json.decode(payload) for payload in payloads]


@dataclass
class Scripted:
    """A scripted engine, its neighbours, and the parts of a server over them."""

    engine: ScriptedEngine
    references: RecordingReferences
    grammars: DoorGrammars
    kv_control: RecordingKvControl
    metrics: Metrics
    parts: Parts


def scripted(
    *,
    role: str = "decode",
    reasoning: ReasoningTags | None = None,
    tools: ToolTags | None = None,
    constraint_in_prompt: bool = False,
    checks: bool = False,
) -> Scripted:
    """A `prefill` hands off, a `decode` takes references."""
    clock, tokenizer, registry = ManualClock(1_700_000_000.0), ByteTokenizer(), Metrics()
    engine, references = ScriptedEngine(clock), RecordingReferences()
    grammars, control = DoorGrammars(), RecordingKvControl()
    model = ServedModel(
        name="m",
        root="m.gguf",
        created_s=1_700_000_000,
        max_model_len_tokens=256,
        tokenizer=tokenizer,
        chat_template=ChatTemplate(TEMPLATE, {}, clock),
        reasoning=reasoning,
        tools=tools,
        constraint_in_prompt=constraint_in_prompt,
    )
    context = SamplingContext(tokenizer=tokenizer, vocab_size=tokenizer.vocab_size, max_model_len_tokens=256)
    is_decode = role == "decode"
    gate = KvGate(references if is_decode else None, hands_off=not is_decode)
    check = FinalCheck(InexactGrammars(), reasoning) if checks else None
    parts = Parts(
        model=model,
        engine=engine,
        kv=gate,
        intake=Intake(model, SamplingReader(context), grammars, clock),
        responder=Responder(gate.guard(engine), model, registry, check),
        grammars=grammars,
        clock=clock,
        is_alive=lambda: engine.is_alive,
        kv_control=None if is_decode else control,
    )
    return Scripted(engine, references, grammars, control, registry, parts)


@asynccontextmanager
async def serving_rig(
    *,
    api_key: str | None = None,
    max_body_bytes: int = 64 << 20,
    opened: bool = True,
    role: str = "decode",
    tls: ssl.SSLContext | None = None,
    **model: Any,
) -> AsyncIterator[Rig]:
    """A running server; `model` as in `scripted`."""
    made, surface = scripted(role=role, **model), Surface()
    if opened:
        surface.open(made.parts)
    settings = AppSettings(role=role, engine_id="e-1", max_body_bytes=max_body_bytes, api_key=api_key)
    server = HttpServer(build_app(surface, made.metrics, settings), "127.0.0.1", 0, drain_s=1.0, tls=tls)
    await server.start()
    url = f"{'http' if tls is None else 'https'}://127.0.0.1:{server.port}"
    try:
        async with aiohttp.ClientSession() as session:
            yield Rig(made.engine, surface, made.metrics, url, session, made.references, made.grammars, made.kv_control)
    finally:
        await server.close()

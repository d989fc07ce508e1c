"""The way of one request, top to bottom (DESIGN §3): route, prepare and prefill side by side, decode, relay.

Owns: the order of things and what must be undone when one of them fails.
Does not know: how a leg talks HTTP, which engine a policy prefers, what is worth a second try.
"""

import asyncio
from collections.abc import Mapping
from typing import Protocol

import msgspec

from common.errors import NotReady, UpstreamError
from common.tasks import only_cause
from proxy import prompt_logprobs
from proxy.call import Call
from proxy.decode_leg import Started, decode
from proxy.fleet.worker import Role, Worker
from proxy.leg_bodies import DecodeBody
from proxy.phase import PhaseTrack, ProxyPhase
from proxy.prefill_leg import Prefilled, prefill, release
from proxy.prepare_leg import prepare
from proxy.retry import Leg
from proxy.services import Services
from proxy.tracing.spans import journey_spans
from proxy.tries import Tries
from proxy.ttft import Breakdown, take_apart
from proxy.upstream import OpenAnswer

_WRITTEN_EARLY_BYTES = 64 << 10
"""Larger bodies are written when they are sent: a second copy would be held all through the prefill."""


class Client(Protocol):
    """Where the answer goes; `proxy.relay` is the one over HTTP."""

    async def pass_on(self, started: Started, breakdown: Breakdown, notes: Mapping[str, object]) -> None:
        """Send everything `started` has to say."""
        ...


class Journey:
    """One request. Made per request, run once.

    Args:
        call: what the client asked.
        services: collaborators of the process.
    """

    def __init__(self, call: Call, services: Services) -> None:
        self._call = call
        self._services = services
        self._track = PhaseTrack(services.clock, call.received_s)
        self._tries = Tries(call, services)
        self._body = DecodeBody(call.fields)
        self._opened: list[OpenAnswer] = []
        self._prefilled: Prefilled | None = None
        self._owes_release = False
        self._decode_worker: Worker | None = None
        self._preparing: asyncio.Task[None] | None = None
        self._fallback: str | None = None
        self._decode_stages_s: Mapping[str, float] = {}

    async def run(self, client: Client) -> None:
        """Serve the request and leave nothing behind, whatever happens.

        Raises:
            NotReady: no engine of a needed role is ready.
            EngineRefused: an engine's error answer, to be passed on as it is.
            UpstreamError: the legs failed in a way that has no better answer.
        """
        end = ProxyPhase.FAILED
        try:
            started = await self._until_first_byte()
            self._track.move_to(ProxyPhase.STREAMING)
            await self._pass_on(client, started)
            end = ProxyPhase.DONE
        except (asyncio.CancelledError, ConnectionResetError):
            end = ProxyPhase.CANCELLED
            if self._track.phase is ProxyPhase.HANDED_OFF:
                self._owes_release = False  # D notices by itself that nobody listens any more, and tells P
            raise
        finally:
            for answer in self._opened:
                answer.close()
            self._unload_decode()
            if self._owes_release:
                self._release_kv()
            self._track.move_to(end)
            self._services.metrics.requests.inc(self._call.path, end.value)
            self._trace()

    async def _until_first_byte(self) -> Started:
        worker = self._route_decode()
        self._track.move_to(ProxyPhase.ROUTED)
        if not (self._call.is_constrained and self._services.config.structured_output == "prepare"):
            return await self._legs(worker)
        try:
            async with asyncio.TaskGroup() as group:
                self._preparing = group.create_task(self._prepare(worker))
                started = await self._legs(worker)
                self._preparing.cancel()
        except BaseExceptionGroup as errors:
            raise only_cause(errors) from None
        return started

    async def _legs(self, decode_worker: Worker) -> Started:
        self._prefilled = await self._prefill(decode_worker)
        kv_params = None if self._prefilled is None else self._prefilled.kv_params
        self._owes_release = kv_params is not None
        if kv_params is None and self._fallback is None:
            self._fallback = "nothing_handed_over"
        if self._fallback is not None:
            self._services.metrics.fallback.inc(self._fallback)
        if self._preparing is not None and self._services.config.dialect == "vllm":
            self._preparing.cancel()  # a warm-up still on its way would only stand beside the decode leg in D's batch
        started = await self._decode(decode_worker, kv_params)
        self._owes_release = False  # D has pulled what it needed
        if self._services.config.routing.min_prefill_bytes and self._decode_worker is not None:
            self._services.prompt_memory.remember(self._decode_worker, self._call)
        if self._prefilled is not None and kv_params is not None and prompt_logprobs.are_wanted(self._call.fields):
            joined = prompt_logprobs.join(self._call.path, self._call.fields, self._prefilled.body, started.first)
            return msgspec.structs.replace(started, first=joined)
        return started

    async def _prepare(self, worker: Worker) -> None:
        try:
            await prepare(self._call, worker, self._services)
        except UpstreamError:
            # Once the decode leg is out, D itself answers for the constraint.
            if self._track.phase is not ProxyPhase.HANDED_OFF:
                raise

    async def _prefill(self, decode_worker: Worker) -> Prefilled | None:
        self._fallback = self._reason_against_prefill(decode_worker)
        if self._fallback is not None:
            return None
        worker = self._services.pick(Role.PREFILL, self._call)
        if worker is None:
            self._without_prefill_engine()
            return None

        if self._call.num_body_bytes <= _WRITTEN_EARLY_BYTES:
            # Runs when the leg is out, in time that is P's anyway.
            asyncio.get_running_loop().call_soon(self._body.open)

        async def send(worker: Worker) -> Prefilled:
            """One prefill leg."""
            self._track.move_to(ProxyPhase.PREFILLING)
            return await prefill(self._call, worker, self._services)

        done = await self._tries.run(Leg.PREFILL, worker, send)
        if done is None:
            self._fallback = "prefill_failed"
        return done

    async def _decode(self, first: Worker, kv_params: bytes | None) -> Started:
        body = self._body.complete(kv_params)

        async def send(worker: Worker) -> Started:
            """One decode leg; on another D than planned, that one's load."""
            self._track.move_to(ProxyPhase.HANDED_OFF)
            if worker is not self._decode_worker:
                self._load_decode(worker)
            return await decode(self._call, body, worker, self._services, self._opened)

        started = await self._tries.run(Leg.DECODE, first, send)
        if started is None:
            raise RuntimeError("only a prefill leg can be done without")
        return started

    async def _pass_on(self, client: Client, started: Started) -> None:
        reported_s = None if self._prefilled is None else self._prefilled.stages_s
        breakdown = take_apart(self._track, reported_s or {}, started.stages_s, is_stream=started.is_stream)
        self._decode_stages_s = {} if started.is_traced else started.stages_s
        notes = {"kind": self._call.kind, "fallback": self._fallback, "retries": self._tries.num_retries}
        try:
            await client.pass_on(started, breakdown, notes)
        except UpstreamError:
            if self._decode_worker is not None:
                self._decode_worker.breaker.on_failure()
            raise
        finally:
            # After the bytes have left: counting is no part of what it counts.
            if breakdown.ttft_s is not None:
                self._services.metrics.observe_ttft(self._call.kind, breakdown.ttft_s, breakdown.stages_s)

    def _trace(self) -> None:
        traces, trace = self._services.traces, self._call.trace
        if traces is None or trace is None or not trace.is_sampled:
            return
        prefilled = self._prefilled
        prefill_s = {} if prefilled is None or prefilled.is_traced else prefilled.stages_s
        attributes: dict[str, str | int] = {
            "http.route": self._call.path,
            "pd.request_id": self._call.request_id,
            "pd.constraint_kind": self._call.kind,
            "pd.outcome": self._track.phase.value,
            "pd.retries": self._tries.num_retries,
        }
        if self._fallback is not None:
            attributes["pd.fallback"] = self._fallback
        if self._call.model is not None:
            attributes["gen_ai.request.model"] = self._call.model
        reports_s = (prefill_s, self._decode_stages_s)
        traces.add(journey_spans(trace, f"POST {self._call.path}", self._track, reports_s, attributes))

    def _release_kv(self) -> None:
        if self._prefilled is not None and self._services.config.dialect == "pd":
            telling = release(self._prefilled, self._call.headers, self._services)
            self._services.background.spawn(telling, name="release", finish=True)

    def _route_decode(self) -> Worker:
        worker = self._services.pick(Role.DECODE, self._call)
        if worker is None:
            raise NotReady("no decode engine is ready", retry_after_s=1.0)
        if not self._services.fleet.is_ready() and self._services.fleet.is_starting(Role.PREFILL):
            raise NotReady("no prefill engine is ready yet", retry_after_s=1.0)
        self._load_decode(worker)
        return worker

    def _load_decode(self, worker: Worker) -> None:
        self._unload_decode()
        worker.load(self._call.num_body_bytes)
        self._decode_worker = worker

    def _unload_decode(self) -> None:
        if self._decode_worker is not None:
            self._decode_worker.unload(self._call.num_body_bytes)

    def _without_prefill_engine(self) -> None:
        if self._services.config.retries.on_no_prefill == "fail":
            raise NotReady("no prefill engine is ready", retry_after_s=1.0)
        self._fallback = "no_prefill_engine"

    def _reason_against_prefill(self, decode_worker: Worker) -> str | None:
        """Why D had better compute this prompt itself; None when nothing speaks against a prefill leg."""
        if prompt_logprobs.are_wanted(self._call.fields) and not prompt_logprobs.can_be_joined(self._call.fields):
            # They are known where the prompt is computed, and the answer must hold them.
            return "prompt_logprobs"
        min_bytes = self._services.config.routing.min_prefill_bytes
        if min_bytes and self._services.prompt_memory.uncached_bytes(decode_worker, self._call) < min_bytes:
            return "short_prompt"
        return None

"""`/v1/completions` and `/v1/chat/completions`: from the HTTP request to a journey and its answer (journey row 1).

Owns: making the `Call`, admission, the register of running requests, failures after a stream has begun.
Does not know: what happens on a journey.
"""

import secrets
from collections.abc import Coroutine, Mapping
from random import Random
from typing import Any

import msgspec

from common.clock import Deadline
from common.errors import PDError
from common.tasks import only_cause
from common.tracing.context import HEADER as TRACE
from common.tracing.context import begin
from proxy.call import CHAT_PATH, Call, make_call
from proxy.fan_out import FanOut, prompts_of
from proxy.goodbyes import Goodbyes
from proxy.incoming import JSON, REQUEST_ID, Incoming, read_body
from proxy.journey import Journey
from proxy.relay import HttpClient
from proxy.responses.client import ResponsesClient
from proxy.responses.request import translate
from proxy.running_requests import RunningRequests
from proxy.services import Services


class LegHeaders:
    """What both legs carry: a fixed part, and of the client's headers the few that are meant for engines.

    Args:
        engine_api_key: replaces the client's `Authorization`; None forwards it.
        forwards_key: whether the client's key is meant for the engines at all (not where it is the proxy's own).
        unique_ids: whether engines take the request id for their own (vLLM), so that it must never repeat.
    """

    def __init__(self, engine_api_key: str | None, *, forwards_key: bool, unique_ids: bool) -> None:
        self._unique_ids = unique_ids
        self._fixed = {"Content-Type": JSON}
        self._forwarded = {TRACE.lower(): TRACE, "tracestate": "tracestate"}
        if engine_api_key is not None:
            self._fixed["Authorization"] = f"Bearer {engine_api_key}"
        elif forwards_key:
            self._forwarded["authorization"] = "Authorization"

    def for_request(self, headers: Mapping[str, str], request_id: str) -> dict[str, str]:
        """Headers of every leg of one request; those of the client with names in lower case."""
        if self._unique_ids:
            request_id = f"{request_id}-{secrets.token_hex(6)}"
        result = {**self._fixed, REQUEST_ID: request_id}
        for key, name in self._forwarded.items():
            value = headers.get(key)
            if value is not None:
                result[name] = value
        return result


class Generation:
    """The handler.

    Args:
        services: collaborators of the process.
        running: where requests can be ended by their id.
        leg_headers: what the legs carry.
        goodbyes: for connections whose stream broke off.
    """

    def __init__(
        self, services: Services, running: RunningRequests, leg_headers: LegHeaders, goodbyes: Goodbyes
    ) -> None:
        self._goodbyes = goodbyes
        self._random = Random()
        self._services = services
        self._running = running
        self._leg_headers = leg_headers

    async def handle(self, incoming: Incoming) -> None:
        """Serve one request.

        Raises:
            PDError: it failed before any byte of an answer left.
        """
        received_s = self._services.clock.now_s()
        body = await read_body(incoming.http, self._services.config)
        call = self._call(incoming, incoming.http.head.path, body, received_s)
        client = self._client(incoming, call)
        prompts = prompts_of(call)
        if prompts:
            work = FanOut(call, prompts, self._services).run(client)
        else:
            work = Journey(call, self._services).run(client)
        await self._answer(incoming, call, client, work)

    async def handle_responses(self, incoming: Incoming) -> None:
        """Serve one request of the Responses API as a chat.

        Raises:
            PDError: it failed before any byte of an answer left.
        """
        received_s = self._services.clock.now_s()
        asked = translate(await read_body(incoming.http, self._services.config))
        call = self._call(incoming, CHAT_PATH, asked.chat_body, received_s)
        client = self._client(incoming, call)
        translating = ResponsesClient(client, asked.echoed, self._services.config.timeouts.stream_idle_s)
        await self._answer(incoming, call, client, Journey(call, self._services).run(translating))

    async def _answer(
        self, incoming: Incoming, call: Call, client: HttpClient, work: Coroutine[Any, Any, None]
    ) -> None:
        try:
            await self._admitted(call, incoming.owner, work)
        except (PDError, BaseExceptionGroup) as error:
            cause = only_cause(error) if isinstance(error, BaseExceptionGroup) else error
            if not client.is_streaming or not isinstance(cause, PDError):
                raise cause from None
            await client.break_off(cause)
            self._goodbyes.say(incoming.http.wire)
        if not incoming.http.is_ended:
            raise RuntimeError("a journey ended without an answer")

    def _client(self, incoming: Incoming, call: Call) -> HttpClient:
        idle_s = self._services.config.timeouts.stream_idle_s
        return HttpClient(incoming.http, call, self._services.limits, idle_s, headers=incoming.answer_headers)

    def _call(self, incoming: Incoming, path: str, body: bytes, received_s: float) -> Call:
        deadline = Deadline(self._services.clock, received_s + self._services.config.timeouts.request_s)
        headers = self._leg_headers.for_request(incoming.http.head.headers, incoming.request_id)
        call = make_call(
            path, body, headers=headers, request_id=incoming.request_id, received_s=received_s, deadline=deadline
        )
        if self._services.traces is None:
            return call
        trace = begin(headers.get(TRACE), self._services.config.tracing.sample_ratio, self._random)
        return msgspec.structs.replace(call, trace=trace, headers={**headers, TRACE: trace.traceparent})

    async def _admitted(self, call: Call, owner: str | None, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in a slot, where an abort can reach it."""
        try:
            with self._running.entered(call.request_id, owner):
                await self._services.admission.acquire()
                try:
                    await work
                finally:
                    self._services.admission.release()
        finally:
            work.close()  # where it never began

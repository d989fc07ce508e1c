"""A scriptable engine over real sockets: plays P and D for the proxy's tests without a model.

It remembers every request, answers like our engines would, and does on demand what engines do on bad days.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

Script = Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]

P_TIMING = "front;dur=0.1, queue;dur=0.2, compute;dur=0.5, handoff;dur=0.1"
D_TIMING = "front;dur=0.1, grammar;dur=0.1, queue;dur=0.1, pull;dur=0.2, compute;dur=0.3, answer;dur=0.1"
KV_PARAMS = (
    '{"do_remote_prefill": true, "do_remote_decode":false, "remote_engine_id":"p-1", "remote_request_id":"r-1",'
    ' "remote_host":"127.0.0.1", "remote_port":1, "remote_block_ids":[1, 2], "lease_id":"lease-1", "x": 1.50}'
)


@dataclass(frozen=True)
class Received:
    path: str
    headers: Mapping[str, str]
    raw: bytes

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.raw)


class MockEngine:
    def __init__(self, role: str, model: str = "m") -> None:
        self.role = role
        self.model = model
        self.port = 0
        self.scheme = "http"
        self.is_ready = True
        self.api_key: str | None = None
        self.num_chunks = 3
        self.received: list[Received] = []
        self.scripts: dict[str, list[Script]] = {}
        self.always: dict[str, Script] = {}
        self.num_cancelled = 0
        self.arrived = asyncio.Event()
        self.cancelled = asyncio.Event()

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    def calls(self, path: str | None = None) -> list[Received]:
        """Requests received, probes left out."""
        return [r for r in self.received if path is None or r.path == path]

    def script(self, path: str, *scripts: Script) -> None:
        """Answer the next requests to `path` with these, one each; then as usual."""
        self.scripts.setdefault(path, []).extend(scripts)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.method == "GET":
            return await self._get(request)
        self.received.append(Received(request.path, request.headers, body))
        self.arrived.set()
        if not self._has_key(request):
            return error(401, "wrong key")
        waiting = self.scripts.get(request.path)
        script = waiting.pop(0) if waiting else self.always.get(request.path, self._usual)
        try:
            return await script(request, body)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            self.cancelled.set()
            raise

    async def _get(self, request: web.Request) -> web.StreamResponse:
        if not self._has_key(request):
            return error(401, "wrong key")
        if request.path == "/ready":
            return web.json_response({}, status=200 if self.is_ready else 503)
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": [{"id": self.model, "object": "model"}]})
        return web.json_response({}, status=404)

    def _has_key(self, request: web.Request) -> bool:
        return self.api_key is None or request.headers.get("Authorization") == f"Bearer {self.api_key}"

    async def _usual(self, request: web.Request, body: bytes) -> web.StreamResponse:
        if request.path == "/prepare":
            return web.json_response({"state": "ready"})
        if request.path == "/kv/release":
            return web.json_response({"released": True})
        if request.path in ("/tokenize", "/detokenize"):
            return web.json_response({"tokens": [1, 2, 3], "role": self.role})
        if self.role == "P" and "do_remote_decode" in json.loads(body).get("kv_transfer_params", {}):
            return prefilled()
        if json.loads(body).get("stream"):
            return await stream(request, [chunk(i) for i in range(self.num_chunks)])
        return whole(request.path)


def prefilled(kv_params: str = KV_PARAMS) -> web.Response:
    text = '{"id": "x", "choices": [{"index": 0}], "kv_transfer_params": ' + kv_params + "}"
    return web.Response(text=text, content_type="application/json", headers={"Server-Timing": P_TIMING})


def whole(path: str = "/v1/completions") -> web.Response:
    kind = "chat.completion" if "chat" in path else "text_completion"
    body = {"id": "x", "object": kind, "choices": [{"index": 0, "text": "a b", "finish_reason": "stop"}]}
    return web.json_response(body, headers={"Server-Timing": D_TIMING})


def chunk(number: int) -> bytes:
    head = b'data: {"id":"c-1","object":"text_completion","created":7,"model":"m","choices":[{"index":0,"text":"'
    return head + str(number).encode() + b'"}]}\n\n'


async def begin_stream(request: web.Request) -> web.StreamResponse:
    headers = {"Content-Type": "text/event-stream", "Server-Timing": D_TIMING}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    return response


async def stream(request: web.Request, pieces: list[bytes], end: bytes = b"data: [DONE]\n\n") -> web.StreamResponse:
    response = await begin_stream(request)
    for piece in pieces:
        await response.write(piece)
        await asyncio.sleep(0)
    await response.write(end)
    await response.write_eof()
    return response


def error(status: int, message: str, **headers: str) -> web.Response:
    body = {"error": {"message": message, "type": "x", "param": None, "code": "y"}}
    return web.json_response(body, status=status, headers=headers)


def answers(status: int, message: str = "no", **headers: str) -> Script:
    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        return error(status, message, **headers)

    return script


async def hangs(request: web.Request, body: bytes) -> web.StreamResponse:
    """Never answers; ends when the caller goes away."""
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def drops(request: web.Request, body: bytes) -> web.StreamResponse:
    """Closes the connection instead of answering."""
    assert request.transport is not None
    request.transport.abort()
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


def dies_after(*pieces: bytes) -> Script:
    """Begins a stream, sends `pieces`, and drops the connection."""

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        response = await begin_stream(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0)
        assert request.transport is not None
        request.transport.close()
        return response

    return script


@asynccontextmanager
async def serving(engine: MockEngine, port: int = 0, tls: ssl.SSLContext | None = None) -> AsyncIterator[MockEngine]:
    app = web.Application(client_max_size=256 << 20)
    app.router.add_route("*", "/{path:.*}", engine.handle)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls).start()
    engine.scheme = "http" if tls is None else "https"
    engine.port = runner.addresses[0][1]
    try:
        yield engine
    finally:
        await runner.cleanup()

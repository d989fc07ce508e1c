"""A mock engine process for proxy measurements: a P that answers at once, a D that streams 20 chunks.

Usage: `python -m benchmarks.mock_engine PORT P|D [CHUNKS [PAUSE_S]]`
"""

import asyncio
import sys

import msgspec
import uvloop
from aiohttp import web

from proxy.server import allow_many_sockets

_HEAD = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m"}
_CHOICE = {"index": 0, "text": " a", "logprobs": None, "finish_reason": "length"}
_KV = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_block_ids": [[1]],
    "remote_host": "127.0.0.1",
    "remote_port": 1,
    "tp_size": 1,
}
_USAGE = {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}
_WHOLE = msgspec.json.encode({**_HEAD, "choices": [_CHOICE], "usage": _USAGE})
_PREFILLED = msgspec.json.encode({**_HEAD, "choices": [_CHOICE], "usage": _USAGE, "kv_transfer_params": _KV})
_EVENT = b"data: " + msgspec.json.encode({**_HEAD, "choices": [{**_CHOICE, "finish_reason": None}]}) + b"\n\n"
_OK = b'{"object":"list","data":[{"id":"m","object":"model"}]}'


_REFUSED = b'{"error":{"message":"temperature must be >= 0","type":"invalid_request_error","param":null,"code":"x"}}'


class _Asked(msgspec.Struct):
    stream: bool = False
    temperature: float = 1.0


def make_app(role: str, num_chunks: int, pause_s: float) -> web.Application:
    """The mock of `role`; D waits `pause_s` between two events."""
    seen = [0]

    async def complete(request: web.Request) -> web.StreamResponse:
        """P's handover, D's stream or whole answer, or a refusal where `temperature` is negative."""
        seen[0] += 1
        asked = msgspec.json.decode(await request.read(), type=_Asked)
        if asked.temperature < 0:
            return web.Response(status=400, body=_REFUSED, content_type="application/json")
        if role == "P":
            return web.Response(body=_PREFILLED, content_type="application/json")
        if not asked.stream:
            return web.Response(body=_WHOLE, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(num_chunks):
            await response.write(_EVENT)
            await asyncio.sleep(pause_s)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def ok(_: web.Request) -> web.Response:
        """What every other path answers."""
        return web.Response(body=_OK, content_type="application/json")

    async def count(_: web.Request) -> web.Response:
        """How many legs came."""
        return web.Response(text=str(seen[0]))

    app = web.Application()
    app.router.add_get("/count", count)
    app.router.add_post("/v1/completions", complete)
    for path in ("/health", "/ready", "/v1/models", "/metrics", "/get_server_info", "/get_model_info"):
        app.router.add_get(path, ok)
    return app


if __name__ == "__main__":
    _port, _role, *_rest = sys.argv[1:]
    uvloop.install()
    allow_many_sockets()
    _chunks, _pause_s = (*_rest, "20", "0")[:2] if len(_rest) != 1 else (_rest[0], "0")
    _app = make_app(_role, int(_chunks), float(_pause_s))
    web.run_app(_app, host="127.0.0.1", port=int(_port), access_log=None, print=None, backlog=8192)

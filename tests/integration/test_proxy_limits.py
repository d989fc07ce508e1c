"""What bounds a request whose other side is slow: bodies that trickle in, hanging engines, clients that do not read."""

import asyncio
import json
import socket
from typing import Any

from aiohttp import web

from tests.support import mock_engine as mock
from tests.support.proxy_rig import rig

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
STREAM: dict[str, Any] = {"model": "m", "prompt": "x", "stream": True}
PIECE = b": " + b"x" * 65_000 + b"\n\n"
NUM_PIECES = 4096  # a quarter of a gigabyte
MOST_HELD_BYTES = 64 << 20  # far above what sockets and buffers of two hops may hold


async def test_a_body_that_does_not_arrive_in_time_is_a_400_and_holds_nothing() -> None:
    async with rig(timeouts={"body_s": 0.05}) as r:
        reader, writer = await asyncio.open_connection("127.0.0.1", r.proxy.port)
        writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"prompt"')
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400")
        assert b"did not arrive in time" in await reader.readuntil(b"}}")
        writer.close()
        r.assert_nothing_is_held()
        assert not r.p.calls()


async def test_all_tries_share_one_deadline() -> None:
    limits = {"request_s": 0.3, "prefill_s": 0.2}
    async with rig(num_prefill=4, timeouts=limits, retries={"prefill_tries": 4}) as r:
        for engine in r.prefill:
            engine.always[COMPLETIONS] = mock.hangs
        status, _, body = await r.post(STREAM)
        assert (status, json.loads(body)["error"]["code"]) == (504, "upstream_timeout")
        assert sum(len(engine.calls()) for engine in r.prefill) == 2  # the second one had what the first had left
        assert not r.d.calls()


async def test_a_client_that_does_not_read_holds_d_back_and_one_that_leaves_stops_it() -> None:
    async with rig() as r:
        num_written = 0

        async def endless(request: web.Request, body: bytes) -> web.StreamResponse:
            nonlocal num_written
            response = await mock.begin_stream(request)
            for _ in range(NUM_PIECES):
                await response.write(PIECE)
                num_written += 1
            return response

        r.d.script(COMPLETIONS, endless)
        body = json.dumps(STREAM).encode()
        with socket.create_connection(("127.0.0.1", r.proxy.port)) as client:
            client.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\n" % COMPLETIONS.encode())
            client.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
            seen = -1
            while num_written != seen or not num_written:
                seen = num_written
                await asyncio.sleep(0.1)  # sockets fill: nothing else to wait on
            assert num_written * len(PIECE) < MOST_HELD_BYTES
        await r.d.cancelled.wait()


async def test_a_chat_with_twenty_megabytes_of_picture_reaches_the_engines_whole() -> None:
    async with rig() as r:
        picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (20 << 20)}}
        status, _, _ = await r.post({"model": "m", "messages": [{"role": "user", "content": [picture]}]}, CHAT)
        assert status == 200
        assert all(call.json["messages"][0]["content"] == [picture] for call in (r.p.calls()[0], r.d.calls()[0]))

from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web

from benchmarks.ttft.measure import Refusal, Sample, measure

ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
TOKEN = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
END = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def ask(session: aiohttp.ClientSession, handler: Handler) -> Sample | Refusal:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", handler)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        return await measure(session, f"http://127.0.0.1:{runner.addresses[0][1]}", {"stream": True})
    finally:
        await runner.cleanup()


def streaming(*pieces: bytes) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        headers = {"Content-Type": "text/event-stream", "Server-Timing": "prefill;dur=1.5"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        return response

    return handler


async def test_the_stages_come_out_of_the_header_and_the_first_token_before_the_end(
    session: aiohttp.ClientSession,
) -> None:
    sample = await ask(session, streaming(ROLE, TOKEN, END))
    assert isinstance(sample, Sample)
    assert sample.stages_ms == {"prefill": pytest.approx(1.5)}
    assert 0 < sample.ttft_ms <= sample.total_ms


async def test_an_answer_that_ends_without_a_word_has_its_finish_for_a_first_token(
    session: aiohttp.ClientSession,
) -> None:
    assert isinstance(await ask(session, streaming(ROLE, END)), Sample)


async def test_a_refused_request_is_no_sample(session: aiohttp.ClientSession) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "oneOf"}}, status=400)

    refusal = await ask(session, refuse)
    assert isinstance(refusal, Refusal)
    assert (refusal.status, "oneOf" in refusal.message) == (400, True)


async def test_an_error_in_the_stream_is_no_sample(session: aiohttp.ClientSession) -> None:
    refusal = await ask(session, streaming(b'data: {"error":{"message":"no grammar"}}\n\n'))
    assert isinstance(refusal, Refusal)
    assert "no grammar" in refusal.message


async def test_a_server_that_is_not_there_is_no_sample(session: aiohttp.ClientSession) -> None:
    assert isinstance(await measure(session, "http://127.0.0.1:9", {}), Refusal)

"""One trace shows the journey: from the caller's span through the proxy's to both legs, at a collector."""

import asyncio
from typing import Any

from aiohttp import web

from tests.support.proxy_rig import rig

TRACE, PARENT = "a" * 32, "b" * 16


async def collector(received: list[dict[str, Any]], got: asyncio.Event) -> web.AppRunner:
    async def take(request: web.Request) -> web.Response:
        received.extend((await request.json())["resourceSpans"][0]["scopeSpans"][0]["spans"])
        got.set()
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/v1/traces", take)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner


async def test_the_callers_trace_holds_the_request_both_legs_and_their_stages() -> None:
    spans: list[dict[str, Any]] = []
    got = asyncio.Event()
    runner = await collector(spans, got)
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    async with rig(tracing={"otlp_url": url}) as r:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        await r.post({"model": "m", "prompt": "x", "stream": True}, headers=headers)
        await r.post({"prompt": "x"}, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
        assert r.services.traces is not None
        await r.services.traces.flush()
        await got.wait()
        legs = [call.headers["traceparent"] for call in (r.p.calls()[0], r.d.calls()[0])]
    await runner.cleanup()
    assert {span["traceId"] for span in spans} == {TRACE}
    by_name = {span["name"]: span for span in spans}
    root = by_name["POST /v1/completions"]
    assert root["parentSpanId"] == PARENT
    assert legs == [f"00-{TRACE}-{by_name[leg]['spanId']}-01" for leg in ("prefill", "decode")]
    assert {"prefill", "decode", "prefill.compute", "decode.pull"} <= set(by_name)
    attributes = {a["key"]: a["value"] for a in root["attributes"]}
    assert attributes["pd.outcome"] == {"stringValue": "done"}
    assert len([span for span in spans if span["name"] == root["name"]]) == 1  # the unsampled one is not there


async def test_a_collector_that_is_away_costs_spans_and_nothing_else() -> None:
    async with rig(tracing={"otlp_url": "http://127.0.0.1:9/v1/traces"}) as r:
        status, _, body = await r.post({"prompt": "x", "stream": True})
        assert (status, body.endswith(b"[DONE]\n\n")) == (200, True)
        assert r.services.traces is not None
        await r.services.traces.flush()
        assert r.services.traces.num_dropped > 0


async def test_without_a_collector_the_clients_context_passes_untouched() -> None:
    async with rig() as r:
        await r.post({"prompt": "x"}, headers={"traceparent": "whatever", "tracestate": "a=b"})
        for engine in (r.p, r.d):
            got = engine.calls()[0].headers
            assert (got["traceparent"], got["tracestate"]) == ("whatever", "a=b")

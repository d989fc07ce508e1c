"""One trace shows the journey through the proxy, P and D, at a collector over real HTTP."""

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from common.serving.tracing import ThreadedCollector
from tests.support.pd_rig import PdRig, pd_rig, regex

TRACE, CALLER = "a" * 32, "b" * 16
ASKED = {"model": "m", "prompt": "where does the time go?", "max_tokens": 4, "temperature": 0, "stream": True}


@asynccontextmanager
async def traced_rig(spans: list[dict[str, Any]]) -> AsyncIterator[PdRig]:
    """Proxy, P and D, whose spans all go to one collector, which adds `service` to each."""

    async def take(request: web.BaseRequest) -> web.Response:
        for resource in (await request.json())["resourceSpans"]:
            (name,) = resource["resource"]["attributes"]
            spans.extend({**s, "service": name["value"]["stringValue"]} for s in resource["scopeSpans"][0]["spans"])
        return web.json_response({})

    runner = web.ServerRunner(web.Server(take))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    try:
        async with pd_rig(
            prefill_s=0.02, compile_s=0.01, collector=ThreadedCollector(url), tracing={"otlp_url": url}
        ) as rig:
            yield rig
    finally:
        await runner.cleanup()


async def ask(rig: PdRig, flags: str, **fields: Any) -> None:
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-{flags}"}
    async with rig.session.post(f"{rig.url}/v1/completions", json={**ASKED, **fields}, headers=headers) as answer:
        assert (await answer.read()).endswith(b"[DONE]\n\n")
    for exporter in rig.exporters:
        await exporter.flush()


async def test_spans_of_both_engines_hang_under_their_legs_which_hang_under_the_callers() -> None:
    spans: list[dict[str, Any]] = []
    async with traced_rig(spans) as rig:
        await ask(rig, "01", **regex(4, "0123456789", 1))
    assert {span["traceId"] for span in spans} == {TRACE}
    by_name = {span["name"]: span for span in spans}
    root = by_name["POST /v1/completions"]
    assert root["parentSpanId"] == CALLER
    for leg in ("prefill", "decode"):
        engine = by_name[f"{leg} /v1/completions"]
        assert by_name[leg]["parentSpanId"] == root["spanId"]
        assert (engine["parentSpanId"], engine["service"]) == (by_name[leg]["spanId"], f"pd-{leg}")
        stages = [s for s in spans if s["name"].startswith(f"{leg}.")]
        assert {(s["parentSpanId"], s["service"]) for s in stages} == {(engine["spanId"], f"pd-{leg}")}
        times = sorted((int(s["startTimeUnixNano"]), int(s["endTimeUnixNano"])) for s in stages)
        assert all(end == start for (_, end), (start, _) in itertools.pairwise(times))
    stages = {span["name"] for span in spans}
    assert {"prefill.front", "prefill.compute", "prefill.handoff"} <= stages
    assert {"decode.grammar", "decode.queue", "decode.pull", "decode.compute", "decode.output"} <= stages
    assert len(by_name) == len(spans)  # no stage is told twice


async def test_a_request_that_nobody_keeps_leaves_no_span_anywhere() -> None:
    spans: list[dict[str, Any]] = []
    async with traced_rig(spans) as rig:
        await ask(rig, "00")
    assert spans == []


async def test_an_engines_refusal_is_a_span_with_its_status() -> None:
    spans: list[dict[str, Any]] = []
    async with traced_rig(spans) as rig:
        headers = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
        async with rig.session.post(f"{rig.p.url}/v1/completions", json={"prompt": []}, headers=headers) as answer:
            assert answer.status == 400
            assert answer.headers["traceresponse"].startswith(f"00-{TRACE}-")
        for exporter in rig.exporters:
            await exporter.flush()
    (span,) = [span for span in spans if "parentSpanId" in span and span["parentSpanId"] == CALLER]
    attributes = {a["key"]: a["value"] for a in span["attributes"]}
    assert (attributes["http.response.status_code"], span["status"]["code"]) == ({"intValue": "400"}, 0)

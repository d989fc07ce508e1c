"""The way of a request through the proxy when all goes well: bodies of the legs, relay, timeline (DESIGN §3)."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from common.wire import timing
from tests.support import mock_engine as mock
from tests.support.proxy_rig import Rig, rig

BASE: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 32}
CHAT = "/v1/chat/completions"
SCHEMA = {"type": "json_schema", "json_schema": {"name": "r", "schema": {"type": "object"}}}


def legs(r: Rig) -> tuple[dict[str, Any], dict[str, Any]]:
    (p,), (d,) = r.p.calls(CHAT), r.d.calls(CHAT)
    return p.json, d.json


async def test_a_stream_reaches_the_client_byte_for_byte() -> None:
    async with rig() as r:
        status, headers, body = await r.post({"model": "m", "prompt": "x", "stream": True})
        assert status == 200
        assert headers["Content-Type"] == "text/event-stream"
        assert body == b"".join(mock.chunk(i) for i in range(3)) + b"data: [DONE]\n\n"
        r.assert_nothing_is_held()


async def test_p_gets_one_token_and_no_constraint_and_d_gets_what_the_client_sent() -> None:
    async with rig() as r:
        extra = {"max_tokens": 500, "min_tokens": 100, "stream": True, "stream_options": {"include_usage": True}}
        asked = {**BASE, **extra, "n": 3, "best_of": 3, "logprobs": True, "top_logprobs": 2, "response_format": SCHEMA}
        asked |= {"tools": [{"type": "function"}], "tool_choice": "required", "stop": ["."], "unknown": {"a": [1]}}
        await r.post(asked, CHAT)
        p, d = legs(r)
        assert d == {**asked, "kv_transfer_params": json.loads(mock.KV_PARAMS)}
        for name in ("stream_options", "min_tokens", "best_of", "logprobs", "response_format", "tool_choice"):
            assert name not in p
        assert (p["stream"], p["max_tokens"], p["n"]) == (False, 1, 1)
        assert "max_completion_tokens" not in p
        assert (p["tools"], p["stop"], p["unknown"]) == (asked["tools"], ["."], {"a": [1]})
        assert p["kv_transfer_params"] == {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
            # What this leg changed, as the client wrote it: P refuses what D would have to.
            "decode_fields": {name: asked[name] for name in (*extra, "n", "best_of", "logprobs", "top_logprobs")},
        }


async def test_max_completion_tokens_is_one_on_p_and_untouched_on_d() -> None:
    async with rig() as r:
        asked = {**BASE, "max_completion_tokens": 500, "min_completion_tokens": 10}
        await r.post(asked, CHAT)
        p, d = legs(r)
        assert (p["max_tokens"], p["max_completion_tokens"], "min_completion_tokens" in p) == (1, 1, False)
        assert (d["max_completion_tokens"], d["min_completion_tokens"]) == (500, 10)


async def test_untouched_fields_and_ps_parameters_keep_their_spelling() -> None:
    async with rig() as r:
        body = b'{"model":"m", "prompt" : "\\u00e4\\/",  "temperature":0.70,"seed":1e2 , "x":{"b":1,"a":2.0}}'
        await r.post(body)
        for leg in (r.p.calls()[0].raw, r.d.calls()[0].raw):
            for piece in (b'"\\u00e4\\/"', b":0.70", b":1e2", b':{"b":1,"a":2.0}'):
                assert piece in leg
        assert mock.KV_PARAMS.encode() in r.d.calls()[0].raw


async def test_kv_transfer_params_of_a_client_never_reach_an_engine() -> None:
    async with rig() as r:
        foreign = {"do_remote_prefill": True, "remote_host": "127.0.0.9", "remote_port": 22, "remote_block_ids": [0]}
        await r.post({**BASE, "kv_transfer_params": foreign}, CHAT)
        assert b"127.0.0.9" not in r.p.calls()[0].raw + r.d.calls()[0].raw
        spelled = b'{"model":"m","prompt":"x","kv_transfer_param\\u0073":{"remote_host":"127.0.0.9"}}'
        await r.post(spelled)
        assert b"127.0.0.9" not in r.p.calls()[-1].raw + r.d.calls()[-1].raw


async def test_a_template_that_renders_constraints_keeps_them_on_p_and_marks_the_leg() -> None:
    async with rig(constraint_in_prompt=True) as r:
        await r.post({**BASE, "response_format": SCHEMA}, CHAT)
        p, _ = legs(r)
        assert p["response_format"] == SCHEMA
        assert p["kv_transfer_params"]["constraint"] == "ignore"


@pytest.mark.parametrize(
    ("mode", "on_p", "num_prepares"), [("prepare", False, 1), ("strip", False, 0), ("naive", True, 0)]
)
async def test_each_mode_sends_the_constraint_where_it_says(mode: str, on_p: bool, num_prepares: int) -> None:
    async with rig(structured_output=mode) as r:
        await r.post({**BASE, "response_format": SCHEMA}, CHAT)
        p, d = legs(r)
        assert ("response_format" in p, "response_format" in d) == (on_p, True)
        assert len(r.d.calls("/prepare")) == num_prepares


async def test_the_prepare_leg_carries_the_constraint_and_no_prompt() -> None:
    async with rig() as r:
        tools = [{"type": "function", "function": {"name": "f"}}]
        await r.post({**BASE, "tools": tools, "tool_choice": "required"}, CHAT)
        assert r.d.calls("/prepare")[0].json == {"model": "m", "tools": tools, "tool_choice": "required"}


async def test_d_prepares_while_p_is_still_at_work() -> None:
    async with rig() as r:

        async def after_prepare(request: web.Request, body: bytes) -> web.StreamResponse:
            await r.d.arrived.wait()  # only the prepare leg can have come
            return mock.prefilled()

        r.p.script(CHAT, after_prepare)
        status, _, _ = await r.post({**BASE, "response_format": SCHEMA}, CHAT)
        assert status == 200
        assert [call.path for call in r.d.calls()] == ["/prepare", CHAT]


async def test_the_decode_leg_does_not_wait_for_prepare() -> None:
    async with rig() as r:
        r.d.script("/prepare", mock.hangs)
        status, _, _ = await r.post({**BASE, "response_format": SCHEMA}, CHAT)
        assert status == 200
        r.assert_nothing_is_held()


@pytest.mark.parametrize("constraint", [{}, {"json": None}, None])
async def test_a_constraint_that_says_nothing_is_none(constraint: Any) -> None:
    async with rig() as r:
        assert (await r.post({**BASE, "structured_outputs": constraint}, CHAT))[0] == 200
        assert not r.d.calls("/prepare")


async def test_both_legs_carry_the_clients_three_headers_and_no_others() -> None:
    async with rig() as r:
        mine = {"Authorization": "Bearer k1", "X-Request-Id": "id-1", "traceparent": "00-1-2-01"}
        _, headers, _ = await r.post(BASE, CHAT, headers={**mine, "X-Internal": "1", "Cookie": "a=b"})
        for engine in (r.p, r.d):
            got = engine.calls()[0].headers
            assert {name: got[name] for name in mine} == mine
            assert not {"X-Internal", "Cookie"} & set(got)
        assert headers["X-Request-Id"] == "id-1"


async def test_chunks_are_passed_on_one_by_one() -> None:
    async with rig() as r:
        seen = asyncio.Event()

        async def slow(request: web.Request, body: bytes) -> web.StreamResponse:
            response = await mock.begin_stream(request)
            await response.write(mock.chunk(0))
            await seen.wait()
            await response.write(mock.chunk(1)[:20])
            await response.write(mock.chunk(1)[20:] + mock.chunk(2))
            await response.write(b"data: [DONE]\n\n")
            return response

        r.d.script("/v1/completions", slow)
        async with r.session.post(r.url + "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            assert await answer.content.readany() == mock.chunk(0)
            seen.set()
            assert await answer.content.read() == mock.chunk(1) + mock.chunk(2) + b"data: [DONE]\n\n"


async def test_ps_silence_about_kv_lets_d_compute_the_prompt() -> None:
    async with rig() as r:

        async def nothing_held(request: web.Request, body: bytes) -> web.StreamResponse:
            return mock.prefilled("null")

        r.p.script("/v1/completions", nothing_held)
        status, _, body = await r.post({"prompt": "x", "timeline": True})
        assert status == 200
        assert "kv_transfer_params" not in r.d.calls()[0].json
        assert json.loads(body)["timeline"]["fallback"] == "nothing_handed_over"


async def test_prompts_with_little_that_is_new_to_d_skip_p() -> None:
    async with rig(routing={"min_prefill_bytes": 300}) as r:
        await r.post({"prompt": "x"})
        assert (len(r.p.calls()), len(r.d.calls())) == (0, 1)
        long = "abc" * 1000
        await r.post({"prompt": long})
        assert len(r.p.calls()) == 1
        await r.post({"prompt": long + "and a short question"})
        assert len(r.p.calls()) == 1
        await r.post({"prompt": long + "and a long one" * 100})
        assert len(r.p.calls()) == 2
        assert b'pd_fallback_total{reason="short_prompt"} 2.0' in (await r.get("/metrics"))[2]


async def test_a_stream_ends_with_its_timeline_where_the_client_asked() -> None:
    async with rig() as r:
        status, headers, body = await r.post({"prompt": "x", "stream": True, "timeline": True})
        *chunks, last = [e for e in body.split(b"\n\n") if e]
        assert (status, last, len(chunks)) == (200, b"data: [DONE]", 4)
        extra = json.loads(chunks[-1].removeprefix(b"data: "))
        assert (extra["id"], extra["object"], extra["choices"]) == ("c-1", "text_completion", [])
        stages_ms = extra["timeline"]["stages_ms"]
        assert sum(stages_ms.values()) == pytest.approx(extra["timeline"]["ttft_ms"], abs=0.02)
        assert stages_ms["prefill"] > 0
        assert sum(timing.decode(headers["Server-Timing"]).values()) * 1000 == pytest.approx(
            extra["timeline"]["ttft_ms"], abs=0.02
        )
        assert "timeline" not in r.p.calls()[0].json
        assert "timeline" not in r.d.calls()[0].json


async def test_an_answer_in_one_piece_holds_its_timeline_where_the_client_asked() -> None:
    async with rig() as r:
        _, _, plain = await r.post({"prompt": "x"})
        _, _, timed = await r.post({"prompt": "x", "timeline": True})
        assert "timeline" not in json.loads(plain)
        timeline = json.loads(timed)["timeline"]
        stages_ms = timeline["stages_ms"]
        assert set(stages_ms) >= {"front", "prefill", "handoff", "pull", "return", "decode"}
        assert sum(stages_ms.values()) == pytest.approx(timeline["total_ms"], abs=0.02)
        assert timeline["ttft_ms"] == pytest.approx(timeline["total_ms"] - stages_ms["decode"], abs=0.02)
        assert timed.startswith(plain[:-1])


async def test_timeline_must_be_a_boolean() -> None:
    async with rig() as r:
        status, _, body = await r.post({"prompt": "x", "timeline": "yes"})
        assert (status, json.loads(body)["error"]["param"]) == (400, "timeline")

"""Several prompts in one completions request, and prompts whose log probabilities are wanted."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from tests.support import mock_engine as mock
from tests.support.proxy_rig import Rig, rig

COMPLETIONS = "/v1/completions"


async def answer_by_prompt(request: web.Request, body: bytes) -> web.StreamResponse:
    """D: n choices whose text is the prompt and the choice's own number."""
    asked = json.loads(body)
    texts = [f"{asked['prompt']}/{i}" for i in range(asked.get("n", 1))]
    usage = {"prompt_tokens": 2, "completion_tokens": len(texts), "total_tokens": 2 + len(texts)}
    head = {"id": f"c-{asked['prompt']}", "object": "text_completion", "created": 1, "model": "m"}
    if not asked.get("stream"):
        choices = [{"index": i, "text": text, "finish_reason": "stop"} for i, text in enumerate(texts)]
        return web.json_response({**head, "choices": choices, "usage": usage})
    events = [{**head, "choices": [{"index": i, "text": text}]} for i, text in enumerate(texts)]
    if asked.get("stream_options"):
        events.append({**head, "choices": [], "usage": usage})
    return await mock.stream(request, [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events])


async def kv_by_prompt(request: web.Request, body: bytes) -> web.StreamResponse:
    return mock.prefilled(json.dumps({"remote_request_id": str(json.loads(body)["prompt"]), "lease_id": "l"}))


def script(r: Rig) -> None:
    r.p.always[COMPLETIONS] = kv_by_prompt
    r.d.always[COMPLETIONS] = answer_by_prompt


@pytest.mark.parametrize("prompts", [["a b c", "x y z"], [[1, 2, 3], [4, 5]]])
async def test_each_prompt_gets_its_own_legs_and_parameters(prompts: list[Any]) -> None:
    async with rig() as r:
        script(r)
        status, _, body = await r.post({"prompt": prompts, "max_tokens": 8, "n": 2})
        assert status == 200
        answer = json.loads(body)
        texts = [f"{prompt}/{i}" for prompt in prompts for i in (0, 1)]
        assert [(c["index"], c["text"]) for c in answer["choices"]] == list(enumerate(texts))
        assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 4, "total_tokens": 8}
        assert sorted(str(c.json["prompt"]) for c in r.p.calls()) == sorted(map(str, prompts))
        for call in r.d.calls():
            assert call.json["kv_transfer_params"]["remote_request_id"] == str(call.json["prompt"])
        r.assert_nothing_is_held()


async def test_streams_of_several_prompts_become_one() -> None:
    async with rig() as r:
        script(r)
        asked = {"prompt": ["a", "b"], "stream": True, "stream_options": {"include_usage": True}}
        status, headers, body = await r.post(asked)
        assert (status, headers["Content-Type"]) == (200, "text/event-stream")
        *events, usage, done = [e.removeprefix(b"data: ") for e in body.split(b"\n\n") if e]
        assert done == b"[DONE]"
        assert json.loads(usage)["usage"]["total_tokens"] == 6
        choices = [json.loads(event)["choices"][0] for event in events]
        assert {(c["index"], c["text"]) for c in choices} == {(0, "a/0"), (1, "b/0")}
        assert len({json.loads(event)["id"] for event in [*events, usage]}) == 1


@pytest.mark.parametrize("prompt", [[1, 2, 3], ["only one"], [[1, 2]], "text", []])
async def test_one_prompt_stays_one_request(prompt: Any) -> None:
    async with rig() as r:
        await r.post({"prompt": prompt})
        assert [call.json["prompt"] for call in r.d.calls()] == [prompt]


@pytest.mark.parametrize("is_stream", [True, False])
async def test_one_refused_prompt_refuses_the_request_and_frees_the_others(is_stream: bool) -> None:
    async with rig() as r:
        r.p.always[COMPLETIONS] = kv_by_prompt
        hung = asyncio.Event()

        async def refuse_b(request: web.Request, body: bytes) -> web.StreamResponse:
            if json.loads(body)["prompt"] == "b":
                await hung.wait()
                return mock.error(400, "b is bad")
            hung.set()
            return await mock.hangs(request, body)

        r.d.always[COMPLETIONS] = refuse_b
        status, _, body = await r.post({"prompt": ["a", "b"], "stream": is_stream})
        assert (status, json.loads(body)["error"]["message"]) == (400, "b is bad")
        await r.d.cancelled.wait()
        r.assert_nothing_is_held()


async def test_a_d_that_dies_under_one_prompt_ends_the_common_stream_with_an_error() -> None:
    async with rig() as r:

        async def die_under_b(request: web.Request, body: bytes) -> web.StreamResponse:
            if json.loads(body)["prompt"] == "b":
                return await mock.dies_after(mock.chunk(0), b"data: {")(request, body)
            return await mock.stream(request, [mock.chunk(0)])

        r.d.always[COMPLETIONS] = die_under_b
        status, _, body = await r.post({"prompt": ["a", "b"], "stream": True})
        events = [json.loads(e.removeprefix(b"data: ")) for e in body.split(b"\n\n") if e]
        assert status == 200
        assert events[-1]["error"]["code"] == "upstream_broken"


async def test_too_many_prompts_are_a_400() -> None:
    async with rig() as r:
        status, _, body = await r.post({"prompt": ["x"] * 1000})
        assert (status, json.loads(body)["error"]["param"]) == (400, "prompt")
        assert not r.p.calls()


@pytest.mark.parametrize("extra", [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}])
async def test_a_prompt_whose_logprobs_are_wanted_is_computed_by_the_engine_that_answers(extra: dict[str, Any]) -> None:
    async with rig() as r:
        assert (await r.post({"prompt": "x", **extra}))[0] == 200
        assert not r.p.calls()
        assert {name: r.d.calls()[0].json[name] for name in extra} == extra
        assert "kv_transfer_params" not in r.d.calls()[0].json


async def test_echo_alone_is_no_reason_to_skip_p() -> None:
    async with rig() as r:
        await r.post({"prompt": "x", "echo": True})
        assert r.d.calls()[0].json["echo"] is True
        assert "kv_transfer_params" in r.d.calls()[0].json

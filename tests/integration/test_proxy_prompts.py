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


@pytest.mark.parametrize(
    "extra",
    [
        {"prompt_logprobs": 1, "stream": True},
        {"echo": True, "logprobs": 1, "stream": True},
        {"echo": True, "logprobs": 1, "max_tokens": 0},
    ],
)
async def test_a_prompt_whose_logprobs_cannot_be_joined_is_computed_by_the_engine_that_answers(
    extra: dict[str, Any],
) -> None:
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


async def test_logprobs_of_the_prompt_come_from_p_and_the_rest_from_d() -> None:
    async with rig() as r:
        script_echo(r)
        status, _, body = await r.post({"prompt": "ab", "echo": True, "logprobs": 1, "n": 2, "max_tokens": 5})
        assert status == 200
        assert (r.p.calls()[0].json["echo"], r.p.calls()[0].json["logprobs"]) == (True, 1)
        assert "echo" not in r.d.calls()[0].json
        assert r.d.calls()[0].json["logprobs"] == 1
        assert [choice["text"] for choice in json.loads(body)["choices"]] == ["abx", "aby"]
        assert json.loads(body)["choices"][1]["logprobs"] == {
            "text_offset": [0, 1, 2],
            "token_logprobs": [None, -1.5, -0.25],
            "tokens": ["a", "b", "y"],
            "top_logprobs": [None, {"b": -1.5}, {"y": -0.25}],
        }


def script_echo(r: Rig) -> None:
    logprobs = {"text_offset": [0, 1, 2], "token_logprobs": [None, -1.5, -9], "tokens": ["a", "b", "?"]}
    logprobs["top_logprobs"] = [None, {"b": -1.5}, {"?": -9}]

    async def p(request: web.Request, body: bytes) -> web.StreamResponse:
        choice = {"index": 0, "text": "ab?", "logprobs": logprobs}
        return web.json_response({"choices": [choice], "kv_transfer_params": {"lease_id": "l"}})

    async def d(request: web.Request, body: bytes) -> web.StreamResponse:
        return web.json_response({"choices": [{"index": i, "text": t, "logprobs": own(t)} for i, t in enumerate("xy")]})

    r.p.always[COMPLETIONS], r.d.always[COMPLETIONS] = p, d


def own(token: str) -> dict[str, Any]:
    top = [{token: -0.25}]
    return {"text_offset": [0], "token_logprobs": [-0.25], "tokens": [token], "top_logprobs": top}


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
async def test_prompt_logprobs_lie_where_one_engine_would_have_put_them(path: str) -> None:
    async with rig() as r:
        values = [None, {"1": {"logprob": -0.5}}]

        async def p(request: web.Request, body: bytes) -> web.StreamResponse:
            choice = {"index": 0, "text": "?", "prompt_logprobs": values}
            kv = {"lease_id": "l"}
            return web.json_response({"choices": [choice], "prompt_logprobs": values, "kv_transfer_params": kv})

        r.p.always[path] = p
        _, _, body = await r.post({"prompt": "ab", "messages": [], "prompt_logprobs": 1}, path)
        assert "prompt_logprobs" not in r.d.calls()[0].json
        answer = json.loads(body)
        assert (answer if "chat" in path else answer["choices"][0])["prompt_logprobs"] == values


async def test_when_p_fails_d_is_asked_for_the_prompts_logprobs_too() -> None:
    async with rig() as r:
        r.p.always[COMPLETIONS] = mock.answers(500)
        assert (await r.post({"prompt": "x", "prompt_logprobs": 1}))[0] == 200
        assert r.d.calls()[0].json["prompt_logprobs"] == 1

"""The official client's own features against the proxy: helpers, tools, raw and streaming responses, its errors."""

import json
from typing import Any, Literal

import openai
import pytest
from aiohttp import web
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from pydantic import BaseModel

from tests.support import chat_scripts
from tests.support import mock_engine as mock
from tests.support.chat_scripts import HEAD, client
from tests.support.proxy_rig import rig

CHAT = "/v1/chat/completions"
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"q": {"type": "string"}},
            "required": ["q"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


class Pick(BaseModel):
    colour: Literal["red", "blue"]
    count: int


def says(message: dict[str, Any], finish: str = "stop") -> mock.Script:
    return chat_scripts.says(message, USAGE, finish)


def streams(*deltas: dict[str, Any], finish: str = "stop") -> mock.Script:
    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        head = {**HEAD, "object": "chat.completion.chunk"}
        chunks = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
        chunks.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
        return await mock.stream(request, [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks])

    return script


async def test_the_parse_helper_sends_its_schema_to_d_alone_and_gets_an_object() -> None:
    async with rig() as r, client(r) as c:
        r.d.script(CHAT, says({"content": '{"colour": "red", "count": 3}'}))
        answer = await c.chat.completions.parse(model="m", messages=MESSAGES, response_format=Pick)
        assert answer.choices[0].message.parsed == Pick(colour="red", count=3)
        assert "response_format" not in r.p.calls()[0].json
        assert r.d.calls(CHAT)[0].json["response_format"]["json_schema"]["strict"] is True


async def test_the_stream_helper_builds_the_same_object_out_of_pieces() -> None:
    async with rig() as r, client(r) as c:
        r.d.script(CHAT, streams({"role": "assistant", "content": '{"colour": '}, {"content": '"blue", "count": 1}'}))
        async with c.chat.completions.stream(model="m", messages=MESSAGES, response_format=Pick) as stream:
            types = {event.type async for event in stream}
            answer = await stream.get_final_completion()
        assert {"content.delta", "content.done"} <= types
        assert answer.choices[0].message.parsed == Pick(colour="blue", count=1)


async def test_a_streamed_tool_call_arrives_with_its_arguments_parsed() -> None:
    first = {"index": 0, "id": "t", "type": "function", "function": {"name": "look", "arguments": ""}}
    pieces = [{"index": 0, "function": {"arguments": part}} for part in ('{"q": ', '"x"}')]
    deltas = [{"tool_calls": [call]} for call in (first, *pieces)]
    async with rig() as r, client(r) as c:
        r.d.script(CHAT, streams({"role": "assistant"}, *deltas, finish="tool_calls"))
        async with c.chat.completions.stream(
            model="m", messages=MESSAGES, tools=[TOOL], tool_choice="required"
        ) as stream:
            answer = await stream.get_final_completion()
        (call,) = answer.choices[0].message.tool_calls or []
        assert (call.function.name, call.function.parsed_arguments) == ("look", {"q": "x"})
        assert "tool_choice" not in r.p.calls()[0].json
        assert r.p.calls()[0].json["tools"] == r.d.calls(CHAT)[0].json["tools"]


async def test_raw_responses_show_the_proxys_headers() -> None:
    async with rig() as r, client(r) as c:
        r.d.script(CHAT, says({"content": "hello"}))
        raw = await c.chat.completions.with_raw_response.create(
            model="m", messages=MESSAGES, extra_headers={"X-Request-Id": "mine"}
        )
        assert raw.headers["X-Request-Id"] == raw.request_id == "mine"
        assert "prefill;dur=" in raw.headers["Server-Timing"]
        assert raw.parse().choices[0].message.content == "hello"


async def test_a_streaming_response_is_read_as_it_comes() -> None:
    async with rig() as r, client(r) as c:
        r.d.script(CHAT, streams({"content": "a"}, {"content": "b"}))
        async with c.chat.completions.with_streaming_response.create(
            model="m", messages=MESSAGES, stream=True
        ) as response:
            lines = [line async for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert len(lines) == 4


async def test_a_client_that_leaves_a_stream_early_leaves_nothing_behind() -> None:
    async with rig() as r, client(r) as c:
        r.d.script(CHAT, streams({"content": "a"}, {"content": "b"}))
        stream = await c.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        async for _ in stream:
            break
        await stream.close()
    r.assert_nothing_is_held()


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, openai.BadRequestError),
        (401, openai.AuthenticationError),
        (404, openai.NotFoundError),
        (422, openai.UnprocessableEntityError),
        (429, openai.RateLimitError),
        (500, openai.InternalServerError),
    ],
)
async def test_an_engines_error_is_the_clients_own_of_its_kind(status: int, kind: type[openai.APIStatusError]) -> None:
    async with rig() as r, client(r) as c:
        r.d.always[CHAT] = mock.answers(status, "says the engine")
        with pytest.raises(kind, match="says the engine"):
            await c.chat.completions.create(model="m", messages=MESSAGES)

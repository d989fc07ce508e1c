"""`/v1/responses` through the official client and both legs."""

import json
from typing import Any

import pytest
from aiohttp import web

from tests.support import chat_scripts
from tests.support import mock_engine as mock
from tests.support.chat_scripts import HEAD, client
from tests.support.proxy_rig import rig

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 1}}


def says(message: dict[str, Any], finish: str = "stop") -> mock.Script:
    return chat_scripts.says(message, USAGE, finish)


def streams(*deltas: dict[str, Any], finish: str = "stop") -> mock.Script:
    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        chunks = [{**HEAD, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
        chunks.append({**HEAD, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
        chunks.append({**HEAD, "choices": [], "usage": USAGE})
        return await mock.stream(request, [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks])

    return script


async def test_a_response_is_a_chat_under_another_name() -> None:
    async with rig() as r, client(r) as api:
        r.d.script(CHAT, says({"content": "Hello"}))
        response = await api.responses.create(model="m", input="hi", instructions="be kind", max_output_tokens=9)
        assert (response.output_text, response.status, response.instructions) == ("Hello", "completed", "be kind")
        assert response.usage is not None
        assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (3, 2, 5)
        assert response.usage.input_tokens_details.cached_tokens == 1
        assert r.d.calls(CHAT)[0].json["max_completion_tokens"] == 9
        assert "kv_transfer_params" in r.d.calls(CHAT)[0].json
        assert r.p.calls(CHAT)[0].json["max_completion_tokens"] == 1


async def test_an_answer_cut_by_the_limit_is_incomplete() -> None:
    async with rig() as r, client(r) as api:
        r.d.script(CHAT, says({"content": "Hel"}, finish="length"))
        response = await api.responses.create(model="m", input="hi")
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"


async def test_thoughts_and_calls_are_items_of_their_own() -> None:
    async with rig() as r, client(r) as api:
        call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
        r.d.script(CHAT, says({"content": None, "reasoning_content": "hm", "tool_calls": [call]}, "tool_calls"))
        response = await api.responses.create(model="m", input="hi")
        assert [item.type for item in response.output] == ["reasoning", "function_call"]
        item = response.output[1]
        assert item.type == "function_call"
        assert (item.call_id, item.name, item.arguments) == ("call_1", "f", '{"a":1}')


async def test_a_stream_tells_of_every_step_and_ends_with_the_whole() -> None:
    async with rig() as r, client(r) as api:
        r.d.script(CHAT, streams({"role": "assistant", "content": ""}, {"content": "Hel"}, {"content": "lo"}))
        stream = await api.responses.create(model="m", input="hi", stream=True)
        events = [event async for event in stream]
        assert [event.type for event in events] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert [event.sequence_number for event in events] == list(range(10))
        last = events[-1]
        assert last.type == "response.completed"
        assert (last.response.output_text, last.response.id) == ("Hello", events[0].response.id)  # type: ignore[union-attr]  # the first is response.created
        assert last.response.usage is not None
        assert last.response.usage.total_tokens == 5


async def test_streamed_thoughts_text_and_calls_build_up_their_items() -> None:
    def piece(index: int, **function: str) -> dict[str, Any]:
        return {
            "tool_calls": [
                {"index": index, "function": function, **({"id": f"c{index}"} if "name" in function else {})}
            ]
        }

    async with rig() as r, client(r) as api:
        deltas = [
            {"reasoning_content": "hm"},
            {"content": "a"},
            piece(0, name="f", arguments=""),
            piece(0, arguments='{"x"'),
        ]
        deltas += [piece(0, arguments=":1}"), piece(1, name="g", arguments="{}")]
        r.d.script(CHAT, streams(*deltas, finish="tool_calls"))
        async with api.responses.stream(model="m", input="hi") as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_response()
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
        calls = [item for item in final.output if item.type == "function_call"]
        assert [(c.call_id, c.name, c.arguments) for c in calls] == [("c0", "f", '{"x":1}'), ("c1", "g", "{}")]


async def test_a_d_that_dies_in_mid_stream_ends_it_with_the_apis_own_error_event() -> None:
    async with rig() as r:
        first = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
        r.d.script(CHAT, mock.dies_after(first))
        status, _, body = await r.post({"model": "m", "input": "hi", "stream": True}, RESPONSES)
        assert status == 200
        name, data = body.split(b"\n\n")[-2].split(b"\n")
        assert name == b"event: error"
        error = json.loads(data.removeprefix(b"data: "))
        assert (error["type"], error["code"]) == ("error", "upstream_broken")
        assert b"response.completed" not in body
        r.assert_nothing_is_held()


@pytest.mark.parametrize("field", [{"previous_response_id": "x"}, {"background": True}, {"store": True}])
async def test_stored_state_is_a_quick_400(field: dict[str, Any]) -> None:
    async with rig() as r:
        status, _, body = await r.post({"model": "m", "input": "hi", **field}, RESPONSES)
        assert (status, json.loads(body)["error"]["param"]) == (400, next(iter(field)))
        assert not r.p.calls()


async def test_engine_refusals_pass_and_constraints_are_prepared() -> None:
    async with rig() as r:
        r.p.script(CHAT, mock.hangs)
        r.d.script("/prepare", mock.answers(400, "bad schema"))
        text = {"format": {"type": "json_schema", "name": "r", "schema": {"type": "nonsense"}}}
        status, _, body = await r.post({"model": "m", "input": "hi", "text": text}, RESPONSES)
        assert (status, json.loads(body)["error"]["message"]) == (400, "bad schema")

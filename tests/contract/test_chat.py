"""Bodies of `/v1/chat/completions`."""

import json
from collections.abc import AsyncIterator

import pytest

from common.engine.structured_output.thinking import Thinking
from common.serving.shaping.reasoning import reasoning_tags
from common.serving.shaping.tool_calls import tool_tags
from tests.support.serving_rig import Answered, Rig, serving_rig

PATH = "/v1/chat/completions"
BASE = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 100}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with serving_rig() as running:
        yield running


@pytest.fixture
async def thinker() -> AsyncIterator[Rig]:
    async with serving_rig(reasoning=reasoning_tags("think"), tools=tool_tags("hermes")) as running:
        yield running


def message_of(answer: Answered, stream: bool) -> dict:
    """The assistant's message, also put together from a stream as a client would."""
    if not stream:
        return answer.json["choices"][0]["message"]
    message: dict = {"content": None}
    for event in answer.events:
        for choice in () if event == "[DONE]" else event["choices"]:
            delta = choice["delta"]
            for key in ("content", "reasoning_content"):
                if delta.get(key):
                    message[key] = (message.get(key) or "") + delta[key]
            for call in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    calls.append({"id": call["id"], "type": call["type"], "function": {"name": "", "arguments": ""}})
                for key, value in call["function"].items():
                    calls[call["index"]]["function"][key] += value
    return message


def finish_of(answer: Answered, stream: bool) -> str:
    if not stream:
        return answer.json["choices"][0]["finish_reason"]
    reasons = [c["finish_reason"] for e in answer.events if e != "[DONE]" for c in e["choices"]]
    assert [r for r in reasons if r is not None] == reasons[-1:]
    return reasons[-1]


async def test_a_whole_answer_has_openai_s_shape(rig: Rig):
    answer = await rig.post(PATH, BASE)
    assert answer.status == 200
    body = answer.json
    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("created") >= 1_700_000_000
    assert body == {
        "object": "chat.completion",
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 20,
            "total_tokens": 26,
            "completion_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
        "system_fingerprint": None,
        "prompt_logprobs": None,
        "kv_transfer_params": None,
    }


async def test_the_prompt_is_the_rendered_template(rig: Rig):
    await rig.post(PATH, {**BASE, "messages": [{"role": "system", "content": [{"type": "text", "text": "be"}]}]})
    assert bytes(rig.engine.requests[0].prompt_token_ids) == b"[system]be\n[assistant]"


async def test_a_stream_opens_with_the_role_and_ends_with_done(rig: Rig):
    first, *chunks, done = (await rig.post(PATH, {**BASE, "stream": True})).events
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first["object"] == "chat.completion.chunk"
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "Hello"
    assert chunks[-1]["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert done == "[DONE]"


async def test_usage_comes_last_and_is_null_before(rig: Rig):
    body = {**BASE, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, _ = (await rig.post(PATH, body)).events
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 26
    assert all(chunk["usage"] is None for chunk in chunks)


async def test_n_choices_each_open_with_their_role(rig: Rig):
    rig.engine.text = ["one", "two"]
    *chunks, _ = (await rig.post(PATH, {**BASE, "n": 2, "stream": True})).events
    roles = [c["choices"][0]["index"] for c in chunks if c["choices"][0]["delta"].get("role")]
    assert roles == [0, 1]
    whole = (await rig.post(PATH, {**BASE, "n": 2})).json["choices"]
    assert [choice["index"] for choice in whole] == [0, 1]
    assert len({choice["message"]["content"] for choice in whole}) == 2


async def test_logprobs_name_token_bytes_and_alternatives(rig: Rig):
    body = {**BASE, "logprobs": True, "top_logprobs": 2, "max_tokens": 1}
    logprobs = (await rig.post(PATH, body)).json["choices"][0]["logprobs"]
    assert logprobs == {
        "content": [
            {
                "token": "H",
                "logprob": -0.5,
                "bytes": [72],
                "top_logprobs": [
                    {"token": "H", "logprob": -0.5, "bytes": [72]},
                    {"token": "a", "logprob": -9999.0, "bytes": [97]},
                ],
            }
        ]
    }


async def test_logprobs_without_alternatives_are_the_token_s_own(rig: Rig):
    *chunks, _ = (await rig.post(PATH, {**BASE, "logprobs": True, "max_tokens": 2, "stream": True})).events
    entries = [e for c in chunks if c["choices"][0]["logprobs"] for e in c["choices"][0]["logprobs"]["content"]]
    assert [(e["token"], e["top_logprobs"]) for e in entries] == [("H", []), ("e", [])]


@pytest.mark.parametrize("stream", [False, True])
async def test_required_tool_calls_are_calls_and_not_content(rig: Rig, stream: bool):
    rig.engine.text = '[{"name": "f", "parameters": {"x": 1}}]'
    rig.grammars.auto = True
    answer = await rig.post(PATH, {**BASE, "tools": [TOOL], "tool_choice": "required", "stream": stream})
    message = message_of(answer, stream)
    assert message["content"] is None
    (call,) = message["tool_calls"]
    assert call["id"].startswith("call_")
    assert call["function"] == {"name": "f", "arguments": '{"x": 1}'}
    assert finish_of(answer, stream) == "tool_calls"
    assert rig.engine.requests[0].constraint is not None
    assert rig.engine.requests[0].constraint.from_tool


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [4, 17, 30])
async def test_calls_cut_short_say_length_and_the_same_in_both_modes(rig: Rig, stream: bool, max_tokens: int):
    rig.engine.text = '[{"name": "f", "parameters": {"x": 1}}]'
    body = {**BASE, "tools": [TOOL], "tool_choice": "required", "max_tokens": max_tokens}
    answer, other = await rig.post(PATH, {**body, "stream": stream}), await rig.post(PATH, body)
    assert finish_of(answer, stream) == "length"
    calls, others = (
        [c["function"] for c in message_of(a, s).get("tool_calls", [])] for a, s in ((answer, stream), (other, False))
    )
    assert calls == others


@pytest.mark.parametrize("stream", [False, True])
async def test_a_named_tool_gets_the_whole_text_as_arguments(rig: Rig, stream: bool):
    rig.engine.text = '{"x": 2}'
    choice = {"type": "function", "function": {"name": "f"}}
    answer = await rig.post(PATH, {**BASE, "tools": [TOOL], "tool_choice": choice, "stream": stream})
    assert message_of(answer, stream)["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 2}'}


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_of_the_model_s_own_accord_follow_its_thinking_and_content(thinker: Rig, stream: bool):
    thinker.engine.text = f"<think>hm</think>Sure.\n{CALL}"
    answer = await thinker.post(PATH, {**BASE, "tools": [TOOL], "stream": stream})
    message = message_of(answer, stream)
    assert (message["reasoning_content"], message["content"]) == ("hm", "Sure.")
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 1}'}
    assert finish_of(answer, stream) == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_forced_call_follows_the_thinking(thinker: Rig, stream: bool):
    thinker.engine.text = '<think>what to look for?</think>{"query": "x"}'
    choice = {"type": "function", "function": {"name": "f"}}
    answer = await thinker.post(PATH, {**BASE, "tools": [TOOL], "tool_choice": choice, "stream": stream})
    message = message_of(answer, stream)
    assert message["reasoning_content"] == "what to look for?"
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "f", "arguments": '{"query": "x"}'}]
    assert finish_of(answer, stream) == "tool_calls"


async def test_the_engine_is_told_what_may_stand_before_the_constrained_part(rig: Rig, thinker: Rig):
    body = {**BASE, "response_format": {"type": "json_object"}}
    opened = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>"}]
    await rig.post(PATH, body)
    await thinker.post(PATH, body)
    await thinker.post(PATH, {**body, "messages": opened, "add_generation_prompt": False})
    assert [request.thinking for request in rig.engine.requests] == [Thinking.NONE]
    assert [request.thinking for request in thinker.engine.requests] == [Thinking.MAY_BEGIN, Thinking.OPEN]


@pytest.mark.parametrize("stream", [False, True])
async def test_strict_tools_constrain_what_the_model_calls_of_its_own_accord(thinker: Rig, stream: bool):
    thinker.engine.text = f"Sure.\n{CALL}"
    tool = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    answer = await thinker.post(PATH, {**BASE, "tools": [tool], "stream": stream})
    constraint = thinker.engine.requests[0].constraint
    assert constraint is not None
    assert constraint.label == "tool"
    assert json.loads(constraint.value)["format"]["triggers"] == ["<tool_call>"]
    assert message_of(answer, stream)["tool_calls"][0]["function"]["name"] == "f"
    assert finish_of(answer, stream) == "tool_calls"


async def test_strict_tools_of_a_model_whose_calls_are_not_read_are_refused_by_name(rig: Rig):
    tool = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    answer = await rig.post(PATH, {**BASE, "tools": [tool]})
    assert answer.status == 400
    assert answer.json["error"]["param"] == "tools.0.function.strict"


@pytest.mark.parametrize("tool_choice", ["none", None])
async def test_without_tools_to_call_the_text_stays_as_it_is(thinker: Rig, tool_choice: str | None):
    thinker.engine.text = CALL
    tools = {"tools": [TOOL], "tool_choice": tool_choice} if tool_choice else {}
    answer = await thinker.post(PATH, {**BASE, **tools})
    assert message_of(answer, False)["content"] == CALL


async def test_reasoning_is_left_out_on_request(thinker: Rig):
    thinker.engine.text = "<think>hm</think>yes"
    answer = await thinker.post(PATH, {**BASE, "include_reasoning": False})
    assert "reasoning_content" not in message_of(answer, False)
    assert message_of(answer, False)["content"] == "yes"


async def test_a_prompt_that_opens_the_thinking_is_noticed(thinker: Rig):
    thinker.engine.text = "hm</think>yes"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>"}]
    body = {**BASE, "messages": messages, "add_generation_prompt": False}
    assert message_of(await thinker.post(PATH, body), False)["reasoning_content"] == "hm"


async def test_constraint_fields_reach_the_template_only_where_it_reads_them():
    body = {**BASE, "response_format": {"type": "json_object"}}
    async with serving_rig() as plain, serving_rig(constraint_in_prompt=True) as reading:
        await plain.post(PATH, body)
        await reading.post(PATH, body)
        assert b"[format]" not in bytes(plain.engine.requests[0].prompt_token_ids)
        assert b"[format]json_object" in bytes(reading.engine.requests[0].prompt_token_ids)


async def test_an_assistant_s_earlier_calls_are_rendered(rig: Rig):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]
    assert (await rig.post(PATH, {**BASE, "messages": messages, "tools": [TOOL]})).status == 200
    prompt = bytes(rig.engine.requests[0].prompt_token_ids).decode()
    assert "None" not in prompt
    assert json.dumps(TOOL["function"]["name"]) in prompt


async def test_a_chat_without_max_tokens_may_fill_the_context(rig: Rig):
    await rig.post(PATH, {"messages": BASE["messages"]})
    request = rig.engine.requests[0]
    assert request.sampling.max_tokens == 256 - len(request.prompt_token_ids)


async def test_max_completion_tokens_wins_over_max_tokens(rig: Rig):
    await rig.post(PATH, {**BASE, "max_tokens": 5, "max_completion_tokens": 2})
    assert rig.engine.requests[0].sampling.max_tokens == 2


async def test_token_ids_come_on_request_in_both_modes(rig: Rig):
    whole = (await rig.post(PATH, {**BASE, "return_token_ids": True, "max_tokens": 2})).json
    assert whole["choices"][0]["token_ids"] == list(b"He")
    assert bytes(whole["prompt_token_ids"]) == b"[user]hi\n[assistant]"
    body = {**BASE, "return_token_ids": True, "max_tokens": 2, "stream": True}
    first, *rest, _ = (await rig.post(PATH, body)).events
    assert first["prompt_token_ids"] == whole["prompt_token_ids"]
    assert [t for c in rest for t in c["choices"][0]["token_ids"]] == list(b"He")

import json
from typing import Any

import pytest

from common.errors import InvalidRequest
from proxy.responses.request import translate


def chat(**fields: Any) -> dict[str, Any]:
    body = {"model": "m", "input": "hi", **fields}
    return json.loads(translate(json.dumps(body).encode()).chat_body)


def test_a_text_becomes_one_user_message_and_instructions_come_first() -> None:
    assert chat()["messages"] == [{"role": "user", "content": "hi"}]
    assert chat(instructions="be kind")["messages"][0] == {"role": "system", "content": "be kind"}


def test_items_become_messages_in_their_order() -> None:
    items = [
        {"role": "developer", "content": "rules"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": '{"a":1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "a"}, {"type": "output_text", "text": "b"}]},
    ]
    messages = chat(input=items)["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert messages[1]["content"] == "weather?"
    assert [c["function"]["name"] for c in messages[2]["tool_calls"]] == ["f", "g"]
    assert messages[3] == {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
    assert [part["text"] for part in messages[4]["content"]] == ["a", "b"]


def test_an_image_is_passed_on_for_the_engine_to_decide() -> None:
    item = {"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]}
    assert chat(input=[item])["messages"][0]["content"] == [{"type": "image_url", "image_url": {"url": "data:x"}}]


def test_limits_formats_tools_and_effort_get_their_chat_names() -> None:
    schema = {"type": "object"}
    got = chat(
        max_output_tokens=7,
        text={"format": {"type": "json_schema", "name": "r", "schema": schema, "strict": True}},
        tools=[{"type": "function", "name": "f", "description": "d", "parameters": schema, "strict": True}],
        tool_choice={"type": "function", "name": "f"},
        reasoning={"effort": "low"},
        stream=True,
        temperature=0.5,
        seed=3,
    )
    assert got["max_completion_tokens"] == 7
    assert got["response_format"]["json_schema"] == {"name": "r", "schema": schema, "strict": True}
    assert got["tools"][0]["function"] == {"name": "f", "description": "d", "parameters": schema, "strict": True}
    assert got["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert got["reasoning_effort"] == "low"
    assert got["stream_options"] == {"include_usage": True}
    assert (got["temperature"], got["seed"]) == (0.5, 3)
    assert chat(tool_choice="required")["tool_choice"] == "required"
    assert "response_format" not in chat(text={"format": {"type": "text"}})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "x"}, "previous_response_id"),
        ({"conversation": {"id": "x"}}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"store": True}, "store"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"text": {"format": {"type": 5}}}, "text"),
    ],
)
def test_what_needs_stored_state_or_makes_no_sense_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(**fields)
    assert refused.value.param == param


def test_harmless_values_of_refused_fields_are_fine() -> None:
    got = chat(store=False, background=False, previous_response_id=None, include=[], truncation="disabled")
    assert set(got) == {"model", "messages"}


def test_input_is_needed() -> None:
    with pytest.raises(InvalidRequest, match="input"):
        translate(b'{"model":"m"}')

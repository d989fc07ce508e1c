import json

import pytest

from common.clock import ManualClock
from common.engine.chat_template import ChatTemplate
from common.errors import InvalidRequest, StartupError

CHATML = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}}
USER = {"role": "user", "content": "hi"}


def template(source: str | None) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, ManualClock(86_400.0 * 365))


def test_messages_become_the_prompt():
    assert template(CHATML).render([USER]) == "<|user|>hi\n<|assistant|>"
    assert template(CHATML).render([USER], add_generation_prompt=False) == "<|user|>hi\n"


def test_blocks_are_trimmed_loops_break_and_special_tokens_are_there():
    source = """{{ bos_token }}
    {% for message in messages %}
        {% if loop.index > 1 %}
            {% break %}
        {% endif %}
{{ message.content }}{{ eos_token }}
    {% endfor %}
"""
    assert template(source).render([USER, USER]) == "<s>\nhi</s>\n"


def test_json_is_not_escaped():
    prompt = template("{{ messages[0].content | tojson }}").render([{"role": "user", "content": "<ü & 'x'>"}])
    assert prompt == "\"<ü & 'x'>\""
    indented = template("{{ tools | tojson(indent=2) }}").render([USER], [TOOL])
    assert json.loads(indented) == [TOOL]
    assert "\n  " in indented


def test_marks_of_generated_text_are_read_over():
    assert template("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c").render([USER]) == "abhic"


def test_the_date_comes_from_the_clock():
    assert template("{{ strftime_now('%Y') }}").render([USER]) == "1971"


def test_text_parts_are_joined_unless_the_template_reads_parts():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    reads_parts = "{% for part in messages[0].content %}[{{ part.text }}]{% endfor %}"

    assert template(CHATML).render([{"role": "user", "content": parts}]) == "<|user|>a\nb\n<|assistant|>"
    assert template(reads_parts).render([{"role": "user", "content": parts}]) == "[a][b]"


def test_call_arguments_reach_the_template_as_objects():
    source = "{{ tools is none }}{{ messages[0].tool_calls[0].function.arguments.city }}"
    assert template(source).render([{"role": "assistant", "tool_calls": [CALL]}]) == "TrueKöln"


def test_further_variables_reach_the_template():
    assert template("{{ enable_thinking }}").render([USER], enable_thinking=False) == "False"


def test_a_final_message_can_be_continued():
    messages = [USER, {"role": "assistant", "content": "Well, "}]
    assert template(CHATML).render(messages, continue_final_message=True) == "<|user|>hi\n<|assistant|>Well,"


@pytest.mark.parametrize(
    ("source", "messages", "kwargs", "param", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", [USER], {}, "messages", "roles must alternate"),
        (CHATML, [{"role": "user", "content": None}], {}, "messages", "chat template"),
        (CHATML, [{"content": "no role"}], {}, "messages", "role"),
        (CHATML, [{"role": "user", "content": 3}], {}, "messages", "chat template"),
        ("{{ messages[7].content.x }}", [USER], {}, "messages", "chat template"),
        ("{{ ''.__class__.__mro__ }}", [USER], {}, "messages", "chat template"),
        ("{{ messages.append(1) }}", [USER], {}, "messages", "chat template"),
        ("{{ 1 // 0 }}", [USER], {}, "messages", "chat template"),
        (None, [USER], {}, "messages", "no chat template"),
        (CHATML, [USER], {"messages": []}, "chat_template_kwargs", "messages cannot be overridden"),
        (CHATML, [USER], {"tools": []}, "chat_template_kwargs", "tools cannot be overridden"),
        (CHATML, [USER], {"strftime_now": 1}, "chat_template_kwargs", "strftime_now cannot be overridden"),
        (CHATML, [{"role": "user", "content": [{"type": "image_url"}]}], {}, "messages[0].content[0]", "only text"),
        (CHATML, [{"role": "assistant", "tool_calls": [{}]}], {}, "messages[0].tool_calls[0]", "needs a function"),
        (
            CHATML,
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            {},
            "messages[0].tool_calls[0].function.arguments",
            "not JSON",
        ),
        (CHATML, [], {"continue_final_message": True}, "messages", "no text to continue"),
    ],
)
def test_what_a_template_cannot_take_is_the_requests_fault(source, messages, kwargs, param, says):
    with pytest.raises(InvalidRequest, match=says) as caught:
        template(source).render(messages, **kwargs)
    assert caught.value.param == param


def test_a_template_that_does_not_parse_stops_the_start():
    with pytest.raises(StartupError, match="chat template: line 2"):
        template("\n{% if %}")


def test_the_callers_messages_are_left_alone():
    messages = [{"role": "system", "content": "s"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    before = json.dumps(messages)

    template(CHATML).render(messages, [TOOL])

    assert json.dumps(messages) == before


def test_tools_are_described_in_the_system_message_when_the_template_knows_none():
    prompt = template(CHATML).render([{"role": "system", "content": "Be brief."}, USER], [TOOL])

    assert prompt.startswith("<|system|>Be brief.\n\n")
    assert json.dumps(TOOL) in prompt
    assert "<tool_call>" in prompt


def test_tools_without_a_system_message_get_one():
    assert template(CHATML).render([USER], [TOOL]).startswith("<|system|>You can call functions")


def test_calls_and_results_become_text_when_the_template_knows_no_tools():
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    assert template(CHATML).render(messages) == (
        "<|user|>hi\n"
        '<|assistant|><tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
        "<|user|><tool_response>\nrain\n</tool_response>\n"
        "<|assistant|>"
    )


def test_a_template_that_knows_tools_gets_them_untouched():
    source = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}{{ messages | length }}"
    assert template(source).render([USER], [TOOL]) == "get_weather1"


def test_templates_differ_by_fingerprint():
    assert template(CHATML).fingerprint == template(CHATML).fingerprint
    assert template(CHATML).fingerprint != template(CHATML + " ").fingerprint

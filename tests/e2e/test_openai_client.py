"""The official `openai` client against the proxy, streaming and not."""

import json

import openai
import pytest

from tests.support.trio import Trio

pytestmark = pytest.mark.slow

SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["colour", "count"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "Pick a colour and a number."}]


@pytest.fixture
def client(trio: Trio) -> openai.OpenAI:
    return openai.OpenAI(base_url=trio.url("proxy") + "/v1", api_key="unused", timeout=60)


def test_models_list_names_the_served_model(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2"]


def test_chat_answers_whole_with_usage(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="smollm2", messages=MESSAGES, max_tokens=12, temperature=0)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 12


def test_chat_streams_the_same_text_with_usage_last(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="smollm2", messages=MESSAGES, max_tokens=12, temperature=0)
    stream = client.chat.completions.create(
        model="smollm2",
        messages=MESSAGES,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.total_tokens == whole.usage.total_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_json_schema_answer_parses_and_fits(client: openai.OpenAI, stream: bool) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "pick", "schema": SCHEMA, "strict": True}}
    answer = client.chat.completions.create(
        model="smollm2", messages=MESSAGES, max_tokens=64, response_format=wanted, stream=stream
    )
    if stream:
        text = "".join(choice.delta.content or "" for chunk in answer for choice in chunk.choices)
    else:
        text = answer.choices[0].message.content
    value = json.loads(text)
    assert value["colour"] in ("red", "green", "blue")
    assert 0 <= value["count"] <= 9


def test_completions_work_with_text_and_with_a_list_of_prompts(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="smollm2", prompt=["Once upon", "The capital of"], max_tokens=4)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(choice.text for choice in answer.choices)


def test_a_bad_parameter_is_a_bad_request_error_naming_it(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="smollm2", messages=MESSAGES, temperature=-5)
    assert refused.value.param == "temperature"


def test_an_unknown_model_is_a_not_found_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=MESSAGES)


def test_a_schema_that_does_not_compile_is_refused_and_the_next_request_is_fine(client: openai.OpenAI) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "bad", "schema": {"type": "nonsense"}}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="smollm2", messages=MESSAGES, response_format=wanted)
    assert "nonsense" in str(refused.value)
    assert client.chat.completions.create(model="smollm2", messages=MESSAGES, max_tokens=2).choices

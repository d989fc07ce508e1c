import pytest

from common.errors import InvalidRequest
from common.openai import requests
from common.openai.requests import AnswerFields, ChatFields, CompletionFields, SamplingFields


def test_unknown_fields_are_tolerated():
    assert requests.read(b'{"model": "m", "frobnicate": {"x": [1]}}', AnswerFields).model == "m"


def test_null_means_absent():
    fields = requests.read(b'{"temperature": null, "stop": null, "n": null}', SamplingFields)
    assert fields == SamplingFields()


@pytest.mark.parametrize(
    ("body", "fields", "param"),
    [
        (b'{"max_tokens": "many"}', SamplingFields, "max_tokens"),
        (b'{"temperature": true}', SamplingFields, "temperature"),
        (b'{"n": 1.5}', SamplingFields, "n"),
        (b'{"stop": 5}', SamplingFields, "stop"),
        (b'{"stop": ["a", 5]}', SamplingFields, "stop[1]"),
        (b'{"logit_bias": [1]}', SamplingFields, "logit_bias"),
        (b'{"temperature": 1e999}', SamplingFields, "temperature"),
        (b'{"stream": "yes"}', AnswerFields, "stream"),
        (b'{"stream_options": {"include_usage": 1}}', AnswerFields, "stream_options.include_usage"),
        (b'{"messages": "hi"}', ChatFields, "messages"),
        (b'{"messages": [{"content": "hi"}]}', ChatFields, "messages[0].role"),
        (b'{"messages": [{"role": 5}]}', ChatFields, "messages[0].role"),
        (b"{}", ChatFields, "messages"),
        (b"{}", CompletionFields, "prompt"),
        (b'{"prompt": 5}', CompletionFields, "prompt"),
        (b'{"prompt": [[1, "a"]]}', CompletionFields, "prompt[0][1]"),
    ],
)
def test_a_wrong_type_is_refused_by_the_name_of_its_field(body, fields, param):
    with pytest.raises(InvalidRequest) as caught:
        requests.read(body, fields)
    assert caught.value.param == param
    assert param.partition("[")[0] in caught.value.message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b'{"a": NaN}',
        b'{"a": "\xff"}',
        b'{"a": "\\ud800"}',
        b'{"a": ' + b"[" * 100_000,
        b'{"a": 1} trailing',
    ],
)
def test_what_is_not_a_json_object_is_the_clients_fault(body):
    with pytest.raises(InvalidRequest):
        requests.read_mapping(body)


def test_prompts_may_be_text_or_token_ids_or_lists_of_either():
    for body, expected in [
        (b'{"prompt": "a"}', "a"),
        (b'{"prompt": ["a", "b"]}', ("a", "b")),
        (b'{"prompt": [1, 2]}', (1, 2)),
        (b'{"prompt": [[1, 2], [3]]}', ((1, 2), (3,))),
    ]:
        assert requests.read(body, CompletionFields).prompt == expected


def test_fields_that_are_left_out_of_a_mapping_are_not_decoded():
    body = b'{"messages": ["\xff"], "tool_choice": "none", "n": 2}'
    assert requests.read_mapping(body, without={"messages"}) == {"tool_choice": "none", "n": 2}

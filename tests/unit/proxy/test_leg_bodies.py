import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.clock import Deadline, ManualClock
from proxy.call import CHAT_PATH, KV_PARAMS, Call, constraint_kind, make_call, parse_fields, render
from proxy.leg_bodies import DecodeBody, LegRules, prefill_body, prepare_body, warm_up_leg

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
TOUCHED = {
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "min_completion_tokens",
    "n",
    "best_of",
    "logprobs",
    "top_logprobs",
    "kv_transfer_params",
    "response_format",
    "structured_outputs",
    "tool_choice",
    "timeline",
}
SPELLED = st.tuples(JSON, st.booleans()).map(lambda pair: json.dumps(pair[0], ensure_ascii=pair[1]))
FIELDS = st.dictionaries(st.text(max_size=6).filter(lambda name: name not in TOUCHED), SPELLED, max_size=5)


def body_of(fields: dict[str, str], space: str = " ") -> bytes:
    members = [f"{json.dumps(name)}{space}:{space}{value}" for name, value in fields.items()]
    return ("{" + space + f"{space},{space}".join(members) + space + "}").encode()


@given(FIELDS, st.sampled_from(["", " ", "\n\t"]))
def test_untouched_fields_travel_byte_for_byte_on_every_leg(fields: dict[str, str], space: str) -> None:
    parsed = parse_fields(body_of(fields, space))
    assert {name: bytes(raw).decode() for name, raw in parsed.items()} == fields
    for leg in (prefill_body(parsed, LegRules()), DecodeBody(parsed).complete(b'{"a": 1.0}')):
        again = parse_fields(leg)
        assert {name: bytes(again[name]).decode() for name in fields} == fields
    assert list(parse_fields(render(parsed))) == list(fields)


@pytest.mark.parametrize("spelling", ["0.7", "0.70", "7e-1", "1e400", "-0", "123456789012345678901234567890"])
def test_numbers_keep_their_spelling(spelling: str) -> None:
    parsed = parse_fields(f'{{"temperature":{spelling}}}'.encode())
    assert b'"temperature":' + spelling.encode() in prefill_body(parsed, LegRules())
    assert b'"temperature":' + spelling.encode() in DecodeBody(parsed).complete(None)


@pytest.mark.parametrize("choice", ['"none"', '"auto"', "null"])
def test_a_tool_choice_that_forces_nothing_stays_on_p(choice: str) -> None:
    parsed = parse_fields(f'{{"tool_choice":{choice}}}'.encode())
    assert json.loads(prefill_body(parsed, LegRules()))["tool_choice"] == json.loads(choice)


@pytest.mark.parametrize("name", ["guided_json", "guided_choice", "guided_whitespace_pattern", "structural_tag"])
def test_the_older_spellings_of_a_constraint_are_stripped_from_p_and_prepared_on_d(name: str) -> None:
    parsed = parse_fields(f'{{"model":"m","{name}":"x"}}'.encode())
    assert name not in json.loads(prefill_body(parsed, LegRules()))
    assert json.loads(prepare_body(parsed))[name] == "x"


STRICT = b'[{"type":"function","function":{"name":"f","strict":true}}]'


@pytest.mark.parametrize(
    "choice", [b"", b',"tool_choice":"auto"', b',"tool_choice":null', b',"tool_choice":"required"']
)
def test_strict_tools_shape_p_s_prompt_but_p_need_not_keep_them(choice: bytes) -> None:
    parsed = parse_fields(b'{"model":"m","tools":' + STRICT + choice + b"}")
    assert constraint_kind(parsed, CHAT_PATH) == "tool"
    leg = json.loads(prefill_body(parsed, LegRules()))
    assert leg["tools"] == json.loads(STRICT)
    assert leg["kv_transfer_params"]["constraint"] == "ignore"
    assert "constraint" not in json.loads(prefill_body(parsed, LegRules(our_engines=False)))["kv_transfer_params"]
    assert json.loads(prepare_body(parsed))["tools"] == json.loads(STRICT)


@pytest.mark.parametrize(
    "fields",
    [
        b'{"tools":[{"function":{"name":"strict"}}]}',
        b'{"tools":[{"function":{"name":"f","strict":false}}]}',
        b'{"tools":"strict"}',
        b'{"tool_choice":"none","tools":' + STRICT + b"}",
    ],
)
def test_tools_that_are_not_strict_constrain_nothing_of_their_own(fields: bytes) -> None:
    assert constraint_kind(parse_fields(fields), CHAT_PATH) is None


def test_naive_legs_keep_every_constraint() -> None:
    parsed = parse_fields(b'{"tool_choice":"required","response_format":{"type":"json_object"}}')
    leg = json.loads(prefill_body(parsed, LegRules(strip_constraint=False)))
    assert leg["tool_choice"] == "required"
    assert leg["response_format"] == {"type": "json_object"}


def test_a_plain_vllm_must_not_stop_on_its_first_token() -> None:
    parsed = parse_fields(b'{"stop":["a"],"stop_token_ids":[1]}')
    leg = json.loads(prefill_body(parsed, LegRules(our_engines=False)))
    assert leg["ignore_eos"] is True
    assert not {"stop", "stop_token_ids"} & set(leg)


def test_without_parameters_the_decode_leg_is_the_clients_body() -> None:
    parsed = parse_fields(b'{"prompt":"x","n":2}')
    assert DecodeBody(parsed).complete(None) == b'{"prompt":"x","n":2}'


def test_prepare_carries_the_constraint_and_no_prompt() -> None:
    parsed = parse_fields(b'{"model":"m","messages":[1],"prompt":"x","structured_outputs":{"regex":"a"},"tools":[1]}')
    assert json.loads(prepare_body(parsed)) == {"model": "m", "structured_outputs": {"regex": "a"}}


def test_a_warm_up_asks_for_a_stream_of_one_token_under_the_constraint_and_has_a_prompt_of_its_own() -> None:
    fields = b'{"model":"m","messages":[1],"n":3,"structured_outputs":{"regex":"a"}'
    path, body = warm_up_leg(parse_fields(fields + b"}"))
    wanted = {"model": "m", "structured_outputs": {"regex": "a"}, "max_tokens": 1, "temperature": 0, "stream": True}
    assert (path, json.loads(body)) == ("/v1/completions", {**wanted, "prompt": "."})
    path, body = warm_up_leg(parse_fields(fields + b',"tools":[1],"tool_choice":"required"}'))
    chat = json.loads(body)
    assert (path, chat.pop("messages")) == ("/v1/chat/completions", [{"role": "user", "content": "."}])
    assert chat == {**wanted, "tools": [1], "tool_choice": "required"}


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("{}", None),
        ('{"response_format":{"type":"text"}}', None),
        ('{"response_format":null,"structured_outputs":null,"tool_choice":null}', None),
        ('{"response_format":{"type":"json_schema"}}', "json"),
        ('{"response_format":{"type":"json_object"}}', "json"),
        ('{"response_format":{"type":"structural_tag"}}', "structural_tag"),
        ('{"response_format":5}', "json"),
        ('{"structured_outputs":{"json":null,"regex":"a"}}', "regex"),
        ('{"structured_outputs":{"choice":["a"]}}', "choice"),
        ('{"structured_outputs":{"grammar":"x"}}', "grammar"),
        ('{"structured_outputs":{"structural_tag":{}}}', "structural_tag"),
        ('{"structured_outputs":{"json_object":true}}', "json"),
        ('{"structured_outputs":{}}', None),
        ('{"structured_outputs":[]}', "json"),
        ('{"structured_outputs":{},"response_format":{"type":"json_object"}}', "json"),
        ('{"guided_json":{}}', "json"),
        ('{"guided_json":null,"guided_regex":"a"}', "regex"),
        ('{"structural_tag":{}}', "structural_tag"),
        ('{"tool_choice":"required"}', "tool"),
        ('{"tool_choice":{"type":"function"},"response_format":{"type":"text"}}', "tool"),
    ],
)
def test_the_kind_of_constraint_is_read_by_a_shallow_look(body: str, kind: str | None) -> None:
    assert constraint_kind(parse_fields(body.encode()), "/v1/chat/completions") == kind


def test_tools_do_not_exist_in_completions() -> None:
    assert constraint_kind(parse_fields(b'{"tool_choice":"required"}'), "/v1/completions") is None


def call_of(body: bytes) -> Call:
    clock = ManualClock()
    return make_call(
        "/v1/completions", body, headers={}, request_id="r", received_s=0, deadline=Deadline.after(clock, 1)
    )


def test_a_call_leaves_out_what_is_not_for_engines() -> None:
    call = call_of(b'{"model":"m","timeline":true,"kv_transfer_params":{"a":1},"x":1}')
    assert (set(call.fields), call.model, call.wants_timeline, call.kind) == ({"model", "x"}, "m", True, "free")
    assert call_of(b'{"model":5,"timeline":null}').model is None


@pytest.mark.parametrize("text", [b"{}", b'{"prompt":"x"}', b'{"prompt": "x", "n":2}'])
@pytest.mark.parametrize("opens_early", [True, False])
def test_a_decode_body_is_the_same_whenever_it_is_written(text: bytes, opens_early: bool) -> None:
    fields = parse_fields(text)
    body = DecodeBody(fields)
    if opens_early:
        body.open()
    for _ in range(2):  # a second try of the leg
        assert json.loads(body.complete(b'{"lease_id":"l"}')) == {**json.loads(text), KV_PARAMS: {"lease_id": "l"}}
    assert json.loads(body.complete(None)) == json.loads(text)

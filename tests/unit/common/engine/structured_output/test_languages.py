"""What each kind of constraint allows, end to end through the service, byte by byte."""

import json

import pytest

from common.engine.structured_output.service import LocalGrammarService
from common.wire.constraint import Constraint, ConstraintKind
from tests.support.grammars import accepts, schema, settle


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        ("[a-z]+@x", "ab@x", True),
        ("[a-z]+@x", "ab@xy", False),
        ("^a$", "a", True),
        ("a|ab", "a", True),
        ("a|ab", "ab", True),
        (".", "\u00e9", True),
    ],
)
def test_a_regex_matches_the_whole_output(
    service: LocalGrammarService, pattern: str, text: str, expected: bool
) -> None:
    assert accepts(service, Constraint(kind=ConstraintKind.REGEX, value=pattern), text) is expected


@pytest.mark.parametrize("choice", ["a", "ab", 'quote " and \\ and /', "(a|b)*", "\u4f60\u597d", "line\nbreak", " "])
def test_each_choice_is_possible_as_it_is_written(service: LocalGrammarService, choice: str) -> None:
    choices = ["a", "ab", 'quote " and \\ and /', "(a|b)*", "\u4f60\u597d", "line\nbreak", " "]
    constraint = Constraint(kind=ConstraintKind.CHOICE, value=json.dumps(choices))
    assert accepts(service, constraint, choice)
    assert not accepts(service, constraint, choice + "x")


def test_json_object_is_any_object_and_nothing_else(service: LocalGrammarService) -> None:
    constraint = Constraint(kind=ConstraintKind.JSON_OBJECT, value="")
    assert accepts(service, constraint, '{"a": [1, {"b": null}], "c": "d\\n"}')
    assert not accepts(service, constraint, "[1]")
    assert not accepts(service, constraint, "3")


@pytest.mark.parametrize("text", ['{"a": 1, "b": 2}', '{\n  "a": 1,\n  "b": 2\n}', '{"a":1,"b":2}'])
def test_whitespace_between_tokens_is_free_by_default(service: LocalGrammarService, text: str) -> None:
    assert accepts(service, schema('{"properties":{"a":{"type":"integer"},"b":{"type":"integer"}}}'), text)


@pytest.mark.parametrize(("blanks", "expected"), [(32, True), (33, False)])
def test_runaway_whitespace_is_capped(service: LocalGrammarService, blanks: int, expected: bool) -> None:
    assert accepts(service, schema('{"type":"array"}'), "[" + " " * blanks + "1]") is expected


def test_whitespace_can_be_turned_off_or_be_the_requests_own(service: LocalGrammarService) -> None:
    compact = schema('{"type":"object"}', any_whitespace=False)
    assert accepts(service, compact, '{"a":1,"b":[1,2]}')
    assert not accepts(service, compact, '{"a": 1}')
    dashed = schema('{"type":"object"}', whitespace_pattern="[ ]?")
    assert accepts(service, dashed, '{"a": 1 }')
    assert not accepts(service, dashed, '{"a":  1}')


@pytest.mark.parametrize(
    ("text", "only_when_open"),
    [
        ('{"a":1}', False),
        ('{"a":1,"b":2}', True),
        ('{"a":1,"in":{"c":"x"}}', False),
        ('{"a":1,"in":{"c":"x","d":0}}', True),
        ('{"a":1,"said":{"any":0}}', False),
    ],
)
def test_objects_that_say_nothing_about_other_keys_are_closed_on_request(
    service: LocalGrammarService, text: str, only_when_open: bool
) -> None:
    inner = {"type": "object", "properties": {"c": {"type": "string"}}}
    said = {"type": "object", "properties": {"x": {}}, "additionalProperties": True}
    outer = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}, "in": inner, "said": said}})
    assert accepts(service, schema(outer), text)
    assert accepts(service, schema(outer, additional_properties=False), text) is not only_when_open


def test_an_ebnf_grammar_and_a_lark_grammar_say_the_same(service: LocalGrammarService) -> None:
    ebnf = Constraint(kind=ConstraintKind.GRAMMAR, value='root ::= "a" root "b" | "x"+')
    lark = Constraint(kind=ConstraintKind.GRAMMAR, value='start: "a" start "b" | "x"+')
    for text, expected in (("aaxxbb", True), ("x", True), ("aab", False), ("", False), ("axbb", False)):
        assert accepts(service, ebnf, text) is expected, text
        assert accepts(service, lark, text) is expected, text


ARGUMENTS = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TAGS = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f="],
        "tags": [
            {"begin": "<f=a>", "content": {"type": "json_schema", "json_schema": ARGUMENTS}, "end": "</f>"},
            {"begin": "<f=b>", "content": {"type": "json_schema", "json_schema": {"type": "boolean"}}, "end": "</f>"},
        ],
    },
}
OLDER_TAGS = {
    "type": "structural_tag",
    "triggers": ["<f="],
    "structures": [
        {"begin": "<f=a>", "schema": ARGUMENTS, "end": "</f>"},
        {"begin": "<f=b>", "schema": '{"type":"boolean"}', "end": "</f>"},
    ],
}


@pytest.mark.parametrize("tag", [TAGS, OLDER_TAGS])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain text, even < and <f", True),
        ('so: <f=a>{"x": 1}</f> and <f=b>true</f>, done', True),
        ('<f=a>{"x":1}</f><f=a>{"x":2}</f>', True),
        ("", True),
        ('<f=a>{"x":"1"}</f>', False),
        ("<f=b>1</f>", False),
        ("<f=c>", False),
        ('<f=a>{"x":1}', False),
        ('<f=a>{"x":1,"x":2}</f>', False),
        ('<f=a>{"x":' + " " * 40 + "1}</f>", False),
    ],
)
def test_structural_tags_leave_text_free_and_bind_what_follows_a_trigger(
    service: LocalGrammarService, tag: dict[str, object], text: str, expected: bool
) -> None:
    constraint = Constraint(kind=ConstraintKind.STRUCTURAL_TAG, value=json.dumps(tag))
    assert accepts(service, constraint, text) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("free <call>12</call> and more", True),
        ("free <call>ab</call>", False),
        ('free <json>{"x":1}</json>', True),
        ('free <json>{"x":' + " " * 40 + "1}</json>", False),
    ],
)
def test_a_form_of_tag_that_only_xgrammar_has(service: LocalGrammarService, text: str, expected: bool) -> None:
    tags = [
        {"begin": "<call>", "content": {"type": "regex", "pattern": "[0-9]+"}, "end": "</call>"},
        {"begin": "<json>", "content": {"type": "json_schema", "json_schema": ARGUMENTS}, "end": "</json>"},
    ]
    form = {"type": "triggered_tags", "triggers": ["<call>", "<json>"], "tags": tags}
    value = json.dumps({"type": "structural_tag", "format": form})
    constraint = Constraint(kind=ConstraintKind.STRUCTURAL_TAG, value=value)
    assert settle(service.compile(constraint)).backend == "xgrammar"
    assert accepts(service, constraint, text) is expected


def test_a_schema_inside_a_tag_is_kept_exactly_or_refused(service: LocalGrammarService) -> None:
    content = {"type": "json_schema", "json_schema": {"type": "array", "uniqueItems": True}}
    for form in (
        {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"},
        {"type": "triggered_tags", "triggers": ["<a>"], "tags": [{"begin": "<a>", "content": content, "end": "</a>"}]},
    ):
        value = json.dumps({"type": "structural_tag", "format": form})
        ticket = settle(service.compile(Constraint(kind=ConstraintKind.STRUCTURAL_TAG, value=value)))
        assert ticket.error is not None
        assert "uniqueItems" in ticket.error.message


def test_a_key_spelled_with_escapes_does_not_slip_past_its_property(service: LocalGrammarService) -> None:
    constraint = schema('{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}')
    assert not accepts(service, constraint, '{"a":1,"\\u0061":"x"}')
    assert not accepts(service, constraint, '{"a":1,"a":"x"}')
    assert accepts(service, constraint, '{"a":1,"b":"x"}')

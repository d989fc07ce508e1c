"""What `strict` tools and `parallel_tool_calls` ask of calls that a model writes of its own accord."""

import json
from typing import Any

import pytest

from common.engine.structured_output.service import LocalGrammarService
from common.errors import ConstraintRejected
from common.openai.constraint import parse_constraint
from common.openai.tool_calls import ToolTags
from common.wire.constraint import Constraint, ConstraintKind
from tests.support.grammars import accepts, make_service, settle

TAGS = ToolTags("<tool_call>", "</tool_call>")
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name: str, parameters: object = None, **more: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "parameters": parameters or CITY, **more}}


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


STRICT, LOOSE = tool("weather", strict=True), tool("search")


def constraint_of(tools: object, **fields: object) -> Constraint:
    found = parse_constraint({"tools": tools, **fields}, TAGS)
    assert found is not None
    assert found.label == "tool"
    return found


@pytest.fixture(scope="module")
def service():
    service = make_service()
    yield service
    service.close()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It will rain, says <tool_cal", True),
        (call("weather", '{"city": "Oslo"}'), True),
        ("Let me see.\n" + call("weather", '{"city":"Oslo"}') + "\n" + call("search", '{"a": [1]}') + " Done.", True),
        (call("weather", '{"city": 1}'), False),
        (call("weather", "{}"), False),
        (call("weather", '{"city": "Oslo", "more": 1}'), False),
        (call("search", '{"city": 1}'), True),
        (call("search", "[1]"), False),
        (call("forecast", "{}"), False),
        ('<tool_call>{"name": "weather"}</tool_call>', False),
        ("<tool_call>\n", False),
    ],
)
def test_a_call_fits_a_tool_and_the_arguments_of_a_strict_one_its_schema(
    service: LocalGrammarService, text: str, expected: bool
) -> None:
    assert accepts(service, constraint_of([STRICT, LOOSE]), text) is expected


@pytest.mark.parametrize("tools", [[STRICT, LOOSE], [LOOSE]])
def test_without_parallel_calls_the_answer_ends_after_the_first(
    service: LocalGrammarService, tools: list[dict[str, object]]
) -> None:
    constraint = constraint_of(tools, parallel_tool_calls=False, tool_choice="auto")
    one = "Well: " + call("search" if len(tools) == 1 else "weather", '{"city": "Oslo"}')
    assert accepts(service, constraint, one)
    assert accepts(service, constraint, "No call.")
    assert not accepts(service, constraint, one + one)
    assert not accepts(service, constraint, one + " ")


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [LOOSE]},
        {"tools": [LOOSE], "tool_choice": "auto", "parallel_tool_calls": True},
        {"tools": [STRICT], "tool_choice": "none"},
        {"tools": [], "parallel_tool_calls": False},
        {"tools": None},
        {},
    ],
)
def test_nothing_to_keep_is_no_constraint(fields: dict[str, Any]) -> None:
    assert parse_constraint(fields, TAGS) is None


def test_under_a_constraint_on_the_whole_output_no_call_can_begin_so_that_one_holds() -> None:
    found = parse_constraint({"tools": [STRICT], "response_format": {"type": "json_object"}}, TAGS)
    assert found is not None
    assert found.kind is ConstraintKind.JSON_OBJECT


def test_strict_is_refused_where_calls_are_not_read_and_its_place_is_named() -> None:
    with pytest.raises(ConstraintRejected, match="tool_parser") as refused:
        parse_constraint({"tools": [LOOSE, STRICT]}, None)
    assert refused.value.param == "tools.1.function.strict"
    assert parse_constraint({"tools": [LOOSE], "parallel_tool_calls": False}, None) is None


def test_a_strict_schema_that_cannot_be_kept_is_refused_by_name(service: LocalGrammarService) -> None:
    unique = tool("f", {"type": "array", "uniqueItems": True}, strict=True)
    ticket = settle(service.compile(constraint_of([unique])))
    assert ticket.error is not None
    assert "uniqueItems" in ticket.error.message
    assert ticket.error.param == "tools"


def test_a_name_is_written_as_json(service: LocalGrammarService) -> None:
    constraint = constraint_of([tool('say "hi"', strict=True)])
    text = call(json.dumps('say "hi"')[1:-1], '{"city":"a"}')
    assert accepts(service, constraint, text)

"""One constraint out of a body, or a 400 that names the field."""

import json
import subprocess
import sys

import pytest

from common.errors import ConstraintRejected
from common.openai.constraint import parse_constraint
from common.wire.constraint import ConstraintKind

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": "search", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None, "structured_outputs": None, "tool_choice": None},
        {"response_format": {"type": "text"}},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "auto"},
        {"tools": TOOLS, "tool_choice": "none"},
        {"guided_json": None},
    ],
)
def test_a_body_may_constrain_nothing(fields: dict[str, object]) -> None:
    assert parse_constraint(fields) is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}, None),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}}}, None),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "response_format.schema"),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA, indent=3), "regex": None}}, "structured_outputs.json"),
        ({"guided_json": SCHEMA}, "guided_json"),
    ],
)
def test_every_spelling_of_a_schema_is_the_same_constraint(fields: dict[str, object], field: str | None) -> None:
    constraint = parse_constraint(fields)
    assert constraint is not None
    assert constraint.kind is ConstraintKind.JSON_SCHEMA
    assert constraint.value == json.dumps(SCHEMA, separators=(",", ":"))
    assert constraint.field == (field or "response_format.json_schema.schema")
    assert constraint.label == "json"


@pytest.mark.parametrize(
    ("options", "kind", "value"),
    [
        ({"regex": "a+"}, ConstraintKind.REGEX, "a+"),
        ({"choice": ["x", " ", "x"]}, ConstraintKind.CHOICE, '["x"," "]'),
        ({"grammar": 'root ::= "a"'}, ConstraintKind.GRAMMAR, 'root ::= "a"'),
        ({"json_object": True}, ConstraintKind.JSON_OBJECT, ""),
        (
            {"structural_tag": '{"type":"structural_tag","format":{"type":"any_text"}}'},
            ConstraintKind.STRUCTURAL_TAG,
            '{"type":"structural_tag","format":{"type":"any_text"}}',
        ),
    ],
)
def test_structured_outputs_has_six_kinds(options: dict[str, object], kind: ConstraintKind, value: str) -> None:
    constraint = parse_constraint({"structured_outputs": options})
    assert constraint is not None
    assert (constraint.kind, constraint.value) == (kind, value)


def test_options_of_structured_outputs_are_part_of_the_constraint() -> None:
    constraint = parse_constraint(
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True, "disable_additional_properties": True}}
    )
    assert constraint is not None
    assert (constraint.any_whitespace, constraint.additional_properties) == (False, False)
    constraint = parse_constraint({"structured_outputs": {"json_object": True, "whitespace_pattern": "[ ]?"}})
    assert constraint is not None
    assert constraint.whitespace_pattern == "[ ]?"


def test_response_format_knows_json_object_and_both_forms_of_structural_tags() -> None:
    constraint = parse_constraint({"response_format": {"type": "json_object"}})
    assert constraint is not None
    assert constraint.kind is ConstraintKind.JSON_OBJECT
    for body in ({"format": {"type": "any_text"}}, {"structures": [], "triggers": ["<"]}):
        constraint = parse_constraint({"response_format": {"type": "structural_tag", **body}})
        assert constraint is not None
        assert json.loads(constraint.value) == {"type": "structural_tag", **body}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"json": ""}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": [1]}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", 3]}}, "structured_outputs.choice.1"),
        ({"structured_outputs": {"choice": "ab"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": " "}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regx": "a"}}, "structured_outputs.regx"),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": "yes"}},
            "structured_outputs.disable_any_whitespace",
        ),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True, "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
        ),
        ({"structured_outputs": "json"}, "structured_outputs"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
        ),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice.function"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
        ({"tools": [TOOLS[0], TOOLS[0]], "tool_choice": "required"}, "tools.1.function.name"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
    ],
)
def test_empty_mistyped_and_contradictory_values_are_refused_by_field(fields: dict[str, object], field: str) -> None:
    with pytest.raises(ConstraintRejected) as refused:
        parse_constraint(fields)
    assert refused.value.param == field


def test_a_named_tool_constrains_to_its_arguments() -> None:
    choice = {"type": "function", "function": {"name": "search"}}
    constraint = parse_constraint({"tools": TOOLS, "tool_choice": choice})
    assert constraint is not None
    assert json.loads(constraint.value) == SCHEMA
    assert constraint.label == "tool"


def test_required_tools_are_an_array_of_calls_and_one_call_when_not_parallel() -> None:
    constraint = parse_constraint({"tools": TOOLS, "tool_choice": "required"})
    assert constraint is not None
    schema = json.loads(constraint.value)
    assert schema["minItems"] == 1
    assert "maxItems" not in schema
    assert [call["properties"]["name"] for call in schema["items"]["anyOf"]] == [{"const": "search"}, {"const": "now"}]
    constraint = parse_constraint({"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False})
    assert constraint is not None
    assert json.loads(constraint.value)["maxItems"] == 1


def test_references_inside_a_tools_parameters_still_point_where_they_did() -> None:
    parameters = {
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
        "properties": {
            "head": {"$ref": "#/$defs/node"},
            "self": {"$ref": "#"},
            "enum": {"enum": [{"$ref": "#"}]},
            "const": {"$ref": "#"},
        },
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    constraint = parse_constraint({"tools": tools, "tool_choice": "required"})
    assert constraint is not None
    moved = json.loads(constraint.value)["$defs"]["tool_0"]
    assert moved["properties"]["head"] == {"$ref": "#/$defs/tool_0/$defs/node"}
    assert moved["$defs"]["node"]["properties"]["next"] == {"$ref": "#/$defs/tool_0/$defs/node"}
    assert moved["properties"]["self"] == {"$ref": "#/$defs/tool_0"}
    assert moved["properties"]["enum"] == {"enum": [{"$ref": "#"}]}
    assert moved["properties"]["const"] == {"$ref": "#/$defs/tool_0"}


def test_key_order_of_the_schema_is_kept() -> None:
    constraint = parse_constraint({"structured_outputs": {"json": {"properties": {"z": {}, "a": {}}}}})
    assert constraint is not None
    assert constraint.value == '{"properties":{"z":{},"a":{}}}'


def test_reading_constraints_needs_no_torch() -> None:
    code = "import sys, common.openai.constraint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

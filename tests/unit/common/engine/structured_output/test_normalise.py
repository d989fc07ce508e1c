"""Rewriting keeps the language: instances are valid before exactly when they are valid after."""

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.structured_output.complement import Complementer, strings_except
from common.engine.structured_output.disjoint import DisjointProver
from common.engine.structured_output.normalise import normalise
from common.engine.structured_output.weaken import weaken

NAMES = st.sampled_from(["a", "b", "c"])
SCALARS = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "x", "xy", "zz", 'q"'])
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=6
)
TYPES = st.sampled_from(["null", "boolean", "object", "array", "number", "integer", "string"])


def leaves() -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        st.just({}),
        TYPES.map(lambda name: {"type": name}),
        st.lists(TYPES, min_size=1, max_size=3, unique=True).map(lambda names: {"type": names}),
        st.lists(SCALARS, min_size=1, max_size=3, unique_by=repr).map(lambda values: {"enum": values}),
        SCALARS.map(lambda value: {"const": value}),
        st.integers(0, 2).map(lambda bound: {"minLength": bound}),
        st.integers(0, 2).map(lambda bound: {"type": "string", "maxLength": bound}),
        st.integers(-2, 2).map(lambda bound: {"minimum": bound}),
        st.integers(-2, 2).map(lambda bound: {"type": "integer", "exclusiveMaximum": bound}),
        st.integers(0, 2).map(lambda bound: {"maxItems": bound, "uniqueItems": bound < 2}),
        st.lists(NAMES, min_size=1, max_size=2, unique=True).map(lambda names: {"required": names}),
        st.just({"format": "no-such-format"}),
    )


def grow(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    pairs = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        st.dictionaries(NAMES, inner, min_size=1, max_size=2).map(lambda named: {"properties": named}),
        pairs.map(lambda members: {"anyOf": members}),
        pairs.map(lambda members: {"oneOf": members}),
        pairs.map(lambda members: {"allOf": members}),
        inner.map(lambda schema: {"not": schema}),
        st.tuples(inner, inner, inner).map(lambda three: dict(zip(("if", "then", "else"), three, strict=True))),
        st.tuples(NAMES, inner).map(lambda pair: {"dependentSchemas": {pair[0]: pair[1]}}),
        st.tuples(NAMES, NAMES).map(lambda pair: {"dependentRequired": {pair[0]: [pair[1]]}}),
        inner.map(lambda schema: {"type": "array", "items": schema}),
    )


SCHEMAS = st.recursive(leaves(), grow, max_leaves=6)


def is_valid(schema: object, value: object) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


@given(SCHEMAS, st.lists(VALUES, min_size=1, max_size=6))
@settings(max_examples=120, deadline=None)
def test_a_normalised_schema_has_the_same_instances(schema: dict[str, Any], values: list[Any]) -> None:
    original = json.dumps(schema)
    normal = normalise(schema)
    assert json.dumps(schema) == original
    for value in values:
        assert is_valid(normal, value) == is_valid(schema, value), (normal, value)


@given(SCHEMAS, st.lists(VALUES, min_size=1, max_size=6))
@settings(max_examples=80, deadline=None)
def test_a_complement_has_exactly_the_other_instances(schema: dict[str, Any], values: list[Any]) -> None:
    opposite = Complementer(schema).complement(schema)
    for value in values if opposite is not None else []:
        assert is_valid(opposite, value) != is_valid(schema, value), (opposite, value)


@given(SCHEMAS, SCHEMAS, st.lists(VALUES, min_size=1, max_size=6))
@settings(max_examples=80, deadline=None)
def test_disjoint_schemas_share_no_instance(one: dict[str, Any], other: dict[str, Any], values: list[Any]) -> None:
    if DisjointProver({}).disjoint(one, other):
        for value in values:
            assert not (is_valid(one, value) and is_valid(other, value)), value


@given(SCHEMAS, st.lists(VALUES, min_size=1, max_size=6))
@settings(max_examples=80, deadline=None)
def test_a_weakened_schema_allows_at_least_as_much_and_names_what_it_left_out(
    schema: dict[str, Any], values: list[Any]
) -> None:
    loose, left_out = weaken(schema)
    for value in values:
        assert is_valid(loose, value) or not is_valid(schema, value)
    if not left_out:
        assert loose == schema


@given(st.lists(st.text('ab"\\.', max_size=3), min_size=1, max_size=3), st.text('ab"\\.\n', max_size=4))
@settings(max_examples=80, deadline=None)
def test_the_regex_of_all_other_strings_matches_all_other_strings(excluded: list[str], text: str) -> None:
    schema = {"type": "string", "pattern": strings_except(excluded)}
    # Python's `$` also matches before a last newline, so ask with one more anchor.
    schema["pattern"] = schema["pattern"].removesuffix("$") + r"\Z"
    assert is_valid(schema, text) == (text not in excluded)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"type": "string"}, {"type": ["integer", "null"]}),
        ({"const": 1}, {"enum": [2, "1"]}),
        ({"type": "string", "maxLength": 2}, {"type": "string", "minLength": 3}),
        (
            {"type": "object", "required": ["kind"], "properties": {"kind": {"const": "a"}}},
            {"type": "object", "properties": {"kind": {"const": "b"}}},
        ),
        (
            {"type": "object", "required": ["x"], "properties": {"x": {}}},
            {"type": "object", "properties": {"y": {}}, "additionalProperties": False},
        ),
    ],
)
def test_these_are_proven_disjoint(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert DisjointProver({}).disjoint(one, other)
    assert DisjointProver({}).disjoint(other, one)


def test_references_below_definitions_keep_everything_in_place() -> None:
    schema = {"properties": {"a": {"oneOf": [{"type": "string"}, {"type": "null"}]}, "b": {"$ref": "#/properties/a"}}}
    assert normalise(schema) == schema
    deeper = {**schema, "properties": {**schema["properties"], "c": {"$ref": "#/properties/a/oneOf/0"}}}
    assert normalise(deeper) == deeper


def test_closing_objects_is_done_only_where_nothing_is_said() -> None:
    schema = {"properties": {"a": {"type": "object", "additionalProperties": True}, "b": {"type": "string"}}}
    assert normalise(schema, additional_properties=False) == {**schema, "additionalProperties": False}

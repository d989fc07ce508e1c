"""What the benchmark calls valid."""

import pytest

from benchmarks.grammar.key_order import in_schema_order
from benchmarks.grammar.outputs import VALID, verdict

SCHEMA = {
    "$defs": {"point": {"properties": {"x": {}, "y": {}}}},
    "properties": {"a": {"type": "integer"}, "p": {"items": {"$ref": "#/$defs/point"}}},
}


@pytest.mark.parametrize(("text", "word"), [('{"a": 1}', None), ('{"a": "1"}', "invalid"), ('{"a": 1', "not JSON")])
def test_an_answer_is_valid_or_says_what_is_wrong(text: str, word: str | None) -> None:
    found = verdict(text, SCHEMA)
    assert found == VALID if word is None else found.startswith(word)


def test_keys_are_put_in_the_schemas_order_at_every_depth() -> None:
    ordered = in_schema_order({"z": 0, "p": [{"y": 1, "x": 2}], "a": 3}, SCHEMA)
    assert list(ordered) == ["a", "p", "z"]
    assert list(ordered["p"][0]) == ["x", "y"]

"""The bound on how deep a compiler recurses: exact without cycles, never too small."""

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.engine.structured_output.recursion import deepest

REF = "#/$defs/"


def longest_path(root: dict[str, Any]) -> int:
    """By trying every path; definitions of `root` count when they are referred to or stand below it."""

    def go(node: dict[str, Any], entered: frozenset[int]) -> int:
        if id(node) in entered:
            return 0
        entered |= {id(node)}
        below = [*node.get("$defs", {}).values(), *node.get("anyOf", [])]
        if "$ref" in node:
            below.append(root["$defs"][node["$ref"].removeprefix(REF)])
        return 1 + max((go(child, entered) for child in below), default=0)

    return go(root, frozenset())


NAMES = "abcd"
NODES = st.recursive(
    st.sampled_from([{}, *({"$ref": REF + name} for name in NAMES)]).map(dict),
    lambda inner: st.lists(inner, max_size=2).map(lambda members: {"anyOf": members}),
    max_leaves=3,
)


@given(st.fixed_dictionaries(dict.fromkeys(NAMES, NODES)), NODES)
def test_the_bound_is_at_least_the_longest_path(definitions: dict[str, Any], node: dict[str, Any]) -> None:
    root = {"$defs": definitions, **node}
    assert deepest(root) >= longest_path(root)


@pytest.mark.parametrize("length", [1, 5])
def test_the_bound_is_exact_without_cycles(length: int) -> None:
    definitions: dict[str, Any] = {str(i): {"anyOf": [{"$ref": f"{REF}{i + 1}"}]} for i in range(length)}
    definitions[str(length)] = {}
    assert deepest({"$defs": definitions}) == 1 + 2 * length + 1


def test_a_cycle_is_entered_once() -> None:
    assert deepest({"$defs": {"a": {"items": {"$ref": REF + "a"}}}, "$ref": REF + "a"}) == 3


def test_a_long_chain_overruns_no_stack_here() -> None:
    length = 2 * sys.getrecursionlimit()
    definitions: dict[str, Any] = {str(i): {"$ref": f"{REF}{i + 1}"} for i in range(length)}
    assert deepest({"$defs": {**definitions, str(length): {}}}) > length

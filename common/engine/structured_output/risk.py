"""Which compilations are cheap by construction, and which must first survive a probe.

Owns: the bounds, measured on hostile inputs (docs/decisions/0003-grammar-process.md). Pure.
Does not know: processes. xgrammar's compile cannot be interrupted and may crash, so it is never cheap.
"""

import math

import msgspec

from common.engine.structured_output.json_schema import Schema, is_schema, reachable
from common.engine.structured_output.recursion import deepest
from common.wire.constraint import Constraint, ConstraintKind

_MAX_JSON_BYTES = 96 << 10
_MAX_TEXT_BYTES = 16 << 10
_MAX_PROPERTIES = 800
"""In one object: llguidance compares them pairwise (3,000 take 3 s, 800 a fifth of one)."""
_MAX_PATTERN_PROPERTIES = 8
"""In one object: their languages are intersected pairwise (800 take over a minute)."""
_MAX_REMAINDERS = 10_000
"""States of all `multipleOf` of one schema taken together (10,000 take 0.1 s, a million 9 s and 400 MB)."""

_MAX_COMBINATIONS = 32
"""Ways to pick one member of each union at one place: llguidance multiplies them out (512 take a second)."""

_MAX_DEPTH = 250
"""Schemas inside each other, references followed: llguidance recurses (1,800 overrun a stack of 8 MB)."""


def needs_probe(backend: str, constraint: Constraint) -> bool:
    """Whether compiling `constraint` with `backend` in this process could take long, much memory, or the process."""
    if backend != "guidance":
        return True
    kind, value = constraint.kind, constraint.value
    if kind is ConstraintKind.JSON_OBJECT:
        return False
    if kind is ConstraintKind.JSON_SCHEMA:
        return len(value) > _MAX_JSON_BYTES or _is_risky_schema(msgspec.json.decode(value))
    return len(value) > _MAX_TEXT_BYTES or "%json" in value


def _is_risky_schema(schema: object) -> bool:
    if not is_schema(schema):
        return False
    remainders, num_nodes = 1.0, 0
    for _, node in reachable(schema):
        num_nodes += 1
        if _num_members(node, "properties") > _MAX_PROPERTIES:
            return True
        if _num_members(node, "patternProperties") > _MAX_PATTERN_PROPERTIES:
            return True
        if _num_combinations(node) > _MAX_COMBINATIONS:
            return True
        remainders *= _remainders(node.get("multipleOf"))
        if remainders > _MAX_REMAINDERS:
            return True
    return num_nodes > _MAX_DEPTH and deepest(schema) > _MAX_DEPTH


def _num_members(node: Schema, keyword: str) -> int:
    members = node.get(keyword)
    return len(members) if isinstance(members, dict) else 0


def _num_combinations(node: Schema) -> int:
    members = node.get("allOf")
    conjuncts = [node, *(members if isinstance(members, list) else [])]
    unions = [union for member in conjuncts if is_schema(member) and isinstance(union := member.get("anyOf"), list)]
    return math.prod(len(union) for union in unions) if len(unions) > 1 else 1


def _remainders(multiple_of: object) -> float:
    """States needed to count modulo `multiple_of`: its digits without the decimal point."""
    if isinstance(multiple_of, bool) or not isinstance(multiple_of, int | float) or multiple_of <= 0:
        return 1.0
    if not math.isfinite(multiple_of):
        return math.inf
    mantissa = f"{multiple_of:.15e}".partition("e")[0].replace(".", "").rstrip("0") or "1"
    return max(float(mantissa), float(multiple_of), 1.0)

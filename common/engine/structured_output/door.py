"""Cheap refusal at the door: what no compiler should ever be shown.

Owns: size, nesting, emptiness and well-formedness of a constraint's value. Runs on the event loop: linear in the text.
Does not know: what a backend can enforce (`exactness`).
"""

import re

import msgspec

from common.errors import ConstraintRejected
from common.wire.constraint import Constraint, ConstraintKind

MAX_VALUE_BYTES = 1 << 20
"""Longest constraint text; real schemas reach tens of kilobytes."""
MAX_NESTING = 64
"""Deepest brackets in JSON texts (vLLM 0.32 has the same limit for schemas)."""
MAX_CHOICES = 4096
MAX_PATTERN_CHARACTERS = 16 << 10

_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_NOT_BRACKETS = re.compile(r"[^\[\]{}]+")
_SURROGATE = re.compile("[\ud800-\udfff]")
_JSON_KINDS = frozenset({ConstraintKind.JSON_SCHEMA, ConstraintKind.STRUCTURAL_TAG, ConstraintKind.CHOICE})


def check_at_door(constraint: Constraint) -> None:
    """Raise `ConstraintRejected` for a value that is empty, too large, too deep or not what its kind says."""
    value, field = constraint.value, constraint.field
    if constraint.kind is ConstraintKind.JSON_OBJECT:
        return
    if not value.strip():
        raise ConstraintRejected(f"an empty {constraint.kind.value} constraint", field)
    num_bytes = len(value.encode("utf-8", "surrogatepass"))
    if num_bytes > MAX_VALUE_BYTES:
        raise ConstraintRejected(f"the constraint has {num_bytes} bytes; the limit is {MAX_VALUE_BYTES}", field)
    if "\x00" in value or "\\u0000" in value:
        raise ConstraintRejected("a NUL character in the constraint", field)
    if _SURROGATE.search(value):
        raise ConstraintRejected("half of a surrogate pair in the constraint", field)
    _check_pattern(constraint.whitespace_pattern, field)
    if constraint.kind in _JSON_KINDS:
        _check_json(constraint)
    elif constraint.kind is ConstraintKind.REGEX:
        _check_pattern(value, field)


def _check_pattern(pattern: str | None, field: str) -> None:
    if pattern is not None and len(pattern) > MAX_PATTERN_CHARACTERS:
        raise ConstraintRejected(
            f"a pattern of {len(pattern)} characters; the limit is {MAX_PATTERN_CHARACTERS}", field
        )


def _check_json(constraint: Constraint) -> None:
    field = constraint.field
    depth = nesting(constraint.value)
    if depth > MAX_NESTING:
        raise ConstraintRejected(f"nested {depth} deep; the limit is {MAX_NESTING}", field)
    try:
        value = msgspec.json.decode(constraint.value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConstraintRejected(f"not JSON: {error}", field) from error
    if constraint.kind is ConstraintKind.CHOICE:
        _check_choices(value, field)
    elif constraint.kind is ConstraintKind.STRUCTURAL_TAG:
        if not isinstance(value, dict):
            raise ConstraintRejected("a structural tag is a JSON object", field)
    elif not isinstance(value, dict | bool):
        raise ConstraintRejected(f"a JSON schema is an object, not {type(value).__name__}", field)


def _check_choices(value: object, field: str) -> None:
    if not isinstance(value, list) or not value or not all(isinstance(choice, str) and choice for choice in value):
        raise ConstraintRejected("choice is a non-empty list of non-empty strings", field)
    if len(value) > MAX_CHOICES:
        raise ConstraintRejected(f"{len(value)} choices; the limit is {MAX_CHOICES}", field)


def nesting(text: str) -> int:
    """Deepest nesting of brackets outside strings; linear, never recursive."""
    depth = deepest = 0
    for bracket in _NOT_BRACKETS.sub("", _STRINGS.sub("", text)):
        if bracket in "[{":
            depth += 1
            deepest = max(deepest, depth)
        else:
            depth -= 1
    return deepest

"""What llguidance compiles for each kind of constraint.

Owns: the language rules on this backend (whitespace, escapes, anchors of choices). Pure; no compiling here.
"""

import json
import re

import llguidance

from common.engine.structured_output.json_rules import DEFAULT_WHITESPACE
from common.errors import ConstraintRejected
from common.wire.constraint import Constraint, ConstraintKind

_JSON_ESCAPES = '"\\bfnrt'
"""Escapes a generated string may hold. Not `u`: a key spelled with it would slip past `properties`, and one character
spelled as a surrogate pair would count twice for `minLength`."""


def json_options(constraint: Constraint) -> dict[str, object]:
    """Options of llguidance for JSON under `constraint`'s rules."""
    options: dict[str, object] = {
        "item_separator": ",",
        "key_separator": ":",
        "json_allowed_escapes": _JSON_ESCAPES,
        "json_allow_general_unicode_escapes": False,
        "lenient": False,
        "coerce_one_of": False,
    }
    if constraint.whitespace_pattern is not None:
        options["whitespace_pattern"] = constraint.whitespace_pattern
    elif constraint.any_whitespace:
        options["whitespace_pattern"] = DEFAULT_WHITESPACE
    else:
        options["whitespace_flexible"] = False
    return options


def grammar_source(constraint: Constraint) -> str:
    """The serialised grammar for `LLMatcher`.

    Raises:
        ConstraintRejected: this backend has no form for the kind.
    """
    kind, value = constraint.kind, constraint.value
    if kind is ConstraintKind.JSON_SCHEMA:
        return _from_schema(value, constraint)
    if kind is ConstraintKind.JSON_OBJECT:
        return _from_schema('{"type":"object"}', constraint)
    if kind is ConstraintKind.REGEX:
        return str(llguidance.LLMatcher.grammar_from_regex(value))
    if kind is ConstraintKind.CHOICE:
        pattern = "|".join(_escape(choice) for choice in json.loads(value))
        return str(llguidance.LLMatcher.grammar_from_regex(f"({pattern})"))
    if kind is ConstraintKind.GRAMMAR:
        return str(llguidance.LLMatcher.grammar_from_lark(value))
    raise ConstraintRejected(f"the guidance backend does not take {kind.value}", constraint.field)


def _escape(text: str) -> str:
    """`text` as a regex that matches only it."""
    return re.sub(r"[^A-Za-z0-9_\u0080-\U0010ffff]", lambda match: f"\\x{{{ord(match.group()):x}}}", text)


def _from_schema(schema: str, constraint: Constraint) -> str:
    try:
        source = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=json_options(constraint))
    except ValueError as error:
        raise ConstraintRejected(f"not a usable JSON schema: {error}", constraint.field) from error
    return str(source)

"""What llguidance compiles for each kind of constraint.

Owns: its source forms. Pure; no compiling here. Its options for JSON: `guidance_options`.
"""

import llguidance

from common.engine.structured_output.guidance_options import json_options
from common.engine.structured_output.patterns import choice_pattern
from common.errors import ConstraintRejected
from common.wire.constraint import Constraint, ConstraintKind


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
        return str(llguidance.LLMatcher.grammar_from_regex(choice_pattern(value)))
    if kind is ConstraintKind.GRAMMAR:
        return str(llguidance.LLMatcher.grammar_from_lark(value))
    raise ConstraintRejected(f"the guidance backend does not take {kind.value}", constraint.field)


def _from_schema(schema: str, constraint: Constraint) -> str:
    try:
        source = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=json_options(constraint))
    except ValueError as error:
        raise ConstraintRejected(f"not a usable JSON schema: {error}", constraint.field) from error
    return str(source)

"""Which backends to try for a constraint, in which order, with what.

Owns: the order of attempts (`auto`: llguidance wherever it has the form, docs/decisions/0003), and the rule that
nothing inexact is attempted unless `on_inexact: validate` says so. Pure.
What each backend keeps: `exactness`. What is rewritten first: `normalise`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from common.config.engine import GrammarConfig
from common.engine.structured_output.exactness import gaps, has_inner_anchor
from common.engine.structured_output.guidance_options import json_options
from common.engine.structured_output.json_schema import Schema, is_schema
from common.engine.structured_output.normalise import normalise
from common.engine.structured_output.risk import needs_probe
from common.engine.structured_output.structural_tag import as_lark, for_xgrammar, read_format
from common.engine.structured_output.weaken import weaken
from common.errors import ConstraintRejected
from common.wire.constraint import Constraint, ConstraintKind


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try.

    Attributes:
        backend: its name.
        constraint: what it is asked to compile; may differ from the request's in form, never in language.
        needs_probe: whether it must first survive a throw-away compile.
        unenforced: keywords that this attempt leaves to the check of the finished text.
    """

    backend: str
    constraint: Constraint
    needs_probe: bool
    unenforced: tuple[str, ...] = ()


_MAX_CHEAP_TAGS = 32


def plan(constraint: Constraint, config: GrammarConfig) -> tuple[Attempt, ...]:
    """Attempts in order; the first that compiles serves, the last one's reason is the refusal's.

    Raises:
        ConstraintRejected: nothing may be attempted.
    """
    asked = _under_config(constraint, config)
    backend = config.backend if config.backend != "auto" else _natural_backend(asked)
    if asked.kind is ConstraintKind.JSON_SCHEMA:
        return _plan_schema(asked, backend, config)
    if asked.kind is ConstraintKind.STRUCTURAL_TAG:
        return (_plan_structural_tag(asked, config),)
    if asked.kind is ConstraintKind.REGEX and backend == "xgrammar" and has_inner_anchor(asked.value):
        raise ConstraintRejected("an anchor inside the regex is ignored by xgrammar", asked.field)
    return (_attempt(backend, asked),)


def is_ebnf(constraint: Constraint) -> bool:
    """Whether a grammar is written in EBNF (`name ::= ...`) rather than Lark (`name: ...`)."""
    return constraint.kind is ConstraintKind.GRAMMAR and "::=" in constraint.value


def _attempt(backend: str, constraint: Constraint, unenforced: tuple[str, ...] = ()) -> Attempt:
    return Attempt(backend, constraint, needs_probe(backend, constraint), unenforced)


def _natural_backend(constraint: Constraint) -> str:
    return "xgrammar" if is_ebnf(constraint) else "guidance"


def _under_config(constraint: Constraint, config: GrammarConfig) -> Constraint:
    if config.disable_any_whitespace and constraint.any_whitespace and constraint.whitespace_pattern is None:
        return msgspec.structs.replace(constraint, any_whitespace=False)
    return constraint


def _plan_schema(constraint: Constraint, backend: str, config: GrammarConfig) -> tuple[Attempt, ...]:
    asked: object = json.loads(constraint.value)
    schema = asked
    if is_schema(asked):
        # Only llguidance keeps an undeclared key apart from the declared ones; the others get closed objects.
        is_open = constraint.additional_properties and backend == "guidance"
        schema = normalise(asked, additional_properties=is_open)
    if schema is False:
        raise ConstraintRejected("no output can satisfy this constraint", constraint.field)
    normal: Schema = schema if is_schema(schema) else {}
    found = gaps(backend, normal)
    attempts: list[Attempt] = []
    if not found:
        attempts.append(_attempt(backend, _with_schema(constraint, normal)))
    if config.on_inexact == "validate":
        attempts.extend(_superset(constraint, normal, backend))
    if not attempts:
        as_asked = gaps(backend, asked) if is_schema(asked) else ()
        raise ConstraintRejected(_listed(as_asked or found), constraint.field)
    return tuple(attempts)


def _plan_structural_tag(constraint: Constraint, config: GrammarConfig) -> Attempt:
    form = read_format(constraint.value, constraint.field)
    if config.backend in ("auto", "guidance"):
        found = as_lark(form, json_options(constraint))
        if found is not None and not any(gaps("guidance", schema) for schema in found[1]):
            lark = msgspec.structs.replace(constraint, kind=ConstraintKind.GRAMMAR, value=found[0])
            risky = any(_attempt("guidance", _with_schema(constraint, schema)).needs_probe for schema in found[1])
            return Attempt("guidance", lark, risky or len(found[1]) > _MAX_CHEAP_TAGS)
    if config.backend == "guidance":
        raise ConstraintRejected("guidance takes structural tags of JSON behind triggers only", constraint.field)
    return _attempt("xgrammar", msgspec.structs.replace(constraint, value=for_xgrammar(form, constraint.field)))


def _superset(constraint: Constraint, normal: Schema, backend: str) -> Sequence[Attempt]:
    loose, left_out = weaken(normal)
    if not left_out or not is_schema(loose) or gaps(backend, loose):
        return ()
    return (_attempt(backend, _with_schema(constraint, loose), left_out),)


def _with_schema(constraint: Constraint, schema: Schema) -> Constraint:
    """The same constraint over another schema, whatever it was before."""
    text = json.dumps(schema, separators=(",", ":"), ensure_ascii=False)
    return msgspec.structs.replace(constraint, kind=ConstraintKind.JSON_SCHEMA, value=text)


def _listed(found: Sequence[str]) -> str:
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    return f"cannot be enforced exactly: {found[0]}{more}"

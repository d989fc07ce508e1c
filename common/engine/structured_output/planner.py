"""Which backends to try for a constraint, in which order, with what.

Owns: the order of attempts. Pure. What each backend enforces exactly: `exactness`.
"""

from dataclasses import dataclass

from common.config.engine import GrammarConfig
from common.wire.constraint import Constraint, ConstraintKind


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try.

    Attributes:
        backend: its name.
        constraint: what it is asked to compile; may differ from the request's in form, never in language.
        unenforced: keywords that this attempt leaves to the check of the finished text.
    """

    backend: str
    constraint: Constraint
    unenforced: tuple[str, ...] = ()


_NATIVE_TO_XGRAMMAR = frozenset({ConstraintKind.STRUCTURAL_TAG})


def plan(constraint: Constraint, config: GrammarConfig) -> tuple[Attempt, ...]:
    """Attempts in order; the first that compiles serves. Raises `ConstraintRejected` when there can be none."""
    if config.backend != "auto":
        return (Attempt(config.backend, constraint),)
    if constraint.kind in _NATIVE_TO_XGRAMMAR or is_ebnf(constraint):
        return (Attempt("xgrammar", constraint),)
    return (Attempt("guidance", constraint),)


def is_ebnf(constraint: Constraint) -> bool:
    """Whether a grammar is written in EBNF (`name ::= ...`) rather than Lark (`name: ...`)."""
    return constraint.kind is ConstraintKind.GRAMMAR and "::=" in constraint.value

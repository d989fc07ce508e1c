"""The tables of what a backend keeps, held against jsonschema: what has no gap is never weakened."""

import importlib.util
import json
import random
from collections.abc import Mapping
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from common.config.engine import GrammarConfig
from common.engine.structured_output.backend import Backend, BackendMatcher, FillRow
from common.engine.structured_output.backends import BackendSet
from common.engine.structured_output.exactness import gaps, has_inner_anchor
from common.engine.structured_output.normalise import normalise
from common.engine.structured_output.planner import plan
from common.engine.structured_output.vocabulary import read_vocabulary
from common.errors import ConstraintRejected
from common.wire.constraint import Constraint, ConstraintKind
from tests.support.byte_tokenizer import EOS_TOKEN_ID, ByteTokenizer
from tests.support.grammars import schema
from tests.support.schema_strategies import SCHEMAS

LIBRARIES = {"xgrammar": "xgrammar", "outlines": "outlines_core", "lm-format-enforcer": "lmformatenforcer"}
NAMES = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is not installed"),
    )
    for name, module in LIBRARIES.items()
]
MAX_TOKENS = 200
CALM_AFTER = 30


@pytest.fixture(scope="module")
def backends() -> BackendSet:
    return BackendSet(read_vocabulary(ByteTokenizer()), num_threads=1)


def allowed(backend: Backend, matcher: BackendMatcher) -> list[int]:
    mask = np.zeros((1, 9), dtype=np.int32)
    backend.fill([FillRow(matcher, 0)], mask)
    return [int(bit) for bit in np.flatnonzero(np.unpackbits(mask.view(np.uint8)[0], bitorder="little")[:261])]


def walk(backend: Backend, matcher: BackendMatcher, rng: random.Random) -> str | None:
    """A random text of the grammar, or None when it did not end in time."""
    text: list[int] = []
    while len(text) < MAX_TOKENS:
        choices = allowed(backend, matcher)
        assert choices, f"a dead end after {bytes(text)!r}"
        assert (EOS_TOKEN_ID in choices) == matcher.can_end()
        closing = [token for token in choices if token == EOS_TOKEN_ID or token in b'"}]']
        calm = len(text) > CALM_AFTER or rng.random() < 0.25
        pool = closing if closing and calm else [token for token in choices if 0x20 < token < 0x7F] or choices
        token = EOS_TOKEN_ID if EOS_TOKEN_ID in pool else rng.choice(pool)
        if token == EOS_TOKEN_ID:
            return bytes(text).decode()
        assert matcher.validate([token]) == 1
        assert matcher.consume(token)
        text.append(token)
    return None


@pytest.mark.parametrize("name", NAMES)
@given(node=SCHEMAS, seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_a_schema_without_gaps_is_kept(backends: BackendSet, name: str, node: dict[str, Any], seed: int) -> None:
    closed = normalise(node, additional_properties=False)
    assume(isinstance(closed, dict) and not gaps(name, closed))
    try:
        grammar = backends.get(name).compile(schema(json.dumps(closed)))
    except ConstraintRejected:
        assume(False)
    text = walk(backends.get(name), grammar.start(), random.Random(seed))
    assume(text is not None)
    jsonschema.validate(json.loads(str(text)), closed, cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize("name", [*NAMES, "guidance"])
def test_every_backend_follows_regexes_and_undoes_tokens(backends: BackendSet, name: str) -> None:
    backend = backends.get(name)
    matcher = backend.compile(Constraint(kind=ConstraintKind.REGEX, value="(ab){2}c?")).start()
    assert allowed(backend, matcher) == [ord("a")]
    assert matcher.validate([*b"abx"]) == 2
    assert not matcher.consume(ord("b"))
    for byte in b"abab":
        assert matcher.consume(byte)
    assert matcher.can_end()
    assert allowed(backend, matcher) == [ord("c"), EOS_TOKEN_ID]
    matcher.rollback(2)
    assert not matcher.can_end()
    assert allowed(backend, matcher) == [ord("a")]


@pytest.mark.parametrize("name", ["guidance", "lm-format-enforcer"])
def test_choices_are_taken_as_they_are_written(backends: BackendSet, name: str) -> None:
    pytest.importorskip(LIBRARIES.get(name, "llguidance"))
    matcher = backends.get(name).compile(Constraint(kind=ConstraintKind.CHOICE, value='["a.b","a"]')).start()
    assert matcher.consume(ord("a"))
    assert matcher.can_end()
    assert allowed(backends.get(name), matcher) == [ord("."), EOS_TOKEN_ID]


def test_outlines_refuses_a_choice_it_could_never_finish(backends: BackendSet) -> None:
    pytest.importorskip("outlines_core")
    with pytest.raises(ConstraintRejected, match="its beginning 'a'"):
        backends.get("outlines").compile(Constraint(kind=ConstraintKind.CHOICE, value='["a.b","c","a"]'))
    matcher = backends.get("outlines").compile(Constraint(kind=ConstraintKind.CHOICE, value='["ab","ac"]')).start()
    assert matcher.validate([*b"ac", EOS_TOKEN_ID]) >= 2


CASES: Mapping[str, list[tuple[dict[str, Any], str]]] = {
    "guidance": [
        ({"items": [{"type": "string"}]}, "prefixItems"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
    ],
    "xgrammar": [
        ({"type": "string", "pattern": "a", "minLength": 2}, "pattern"),
        ({"not": {"pattern": "a"}}, "not"),
        ({"$ref": "#/elsewhere/x", "elsewhere": {"x": {"type": "string", "pattern": "a", "minLength": 2}}}, "pattern"),
        ({"type": "string", "pattern": "(^a)"}, "anchor"),
        ({"$ref": "https://example.invalid/schema"}, "not a schema in this text"),
    ],
    "outlines": [({"type": "integer", "minimum": 3}, "minimum"), ({"$ref": "#"}, "ref")],
    "lm-format-enforcer": [({"type": "integer"}, "exponent"), ({"enum": ["\u00e9"]}, "plain ASCII")],
}


@pytest.mark.parametrize(("name", "node", "reason"), [(name, *case) for name, cases in CASES.items() for case in cases])
def test_a_gap_is_named_before_anything_is_compiled(name: str, node: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConstraintRejected, match=reason):
        plan(schema(json.dumps(node)), GrammarConfig(backend=name))


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [("^a[^b]\\$c$", False), ("[$^]", False), ("^(a|b)$", False), ("(^a|b$)", True), ("a^b", True)],
)
def test_anchors_inside_a_pattern_are_found(pattern: str, expected: bool) -> None:
    assert has_inner_anchor(pattern) is expected


def test_older_drafts_keep_their_list_of_items() -> None:
    node = {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "string"}]}
    assert gaps("guidance", node) == ()

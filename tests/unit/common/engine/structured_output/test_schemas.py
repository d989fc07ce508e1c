"""Real schemas with valid and invalid instances: each is followed exactly, or refused with a reason."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.grammar.key_order import in_schema_order
from common.engine.structured_output.service import LocalGrammarService
from common.errors import ConstraintRejected
from tests.support.byte_tokenizer import EOS_TOKEN_ID
from tests.support.grammars import STOPS, make_service, schema, settle, start

SMALL = [json.loads(line) for line in (Path(__file__).parents[4] / "data" / "schemas.jsonl").read_text().splitlines()]
OTHER_ORDER = frozenset({"JsonSchemaStore---schema-project"})
"""Valid instances whose conditional properties come before declared ones; generated, they come after."""
SHARED = os.environ.get("PD_SHARED")


def misjudged(service: LocalGrammarService, case: dict[str, Any]) -> list[str]:
    """Instances the matcher judges differently from their label; raises when the schema is refused."""
    ticket = settle(service.compile(schema(json.dumps(case["schema"]))))
    if ticket.error is not None:
        raise ticket.error
    wrong: list[str] = []
    for test in case["tests"]:
        # A valid instance may have its keys in another order than they are generated in; an invalid one in any.
        spellings = [test["data"], in_schema_order(test["data"], case["schema"])]
        accepted = [is_accepted(service, ticket, json.dumps(data, ensure_ascii=False)) for data in spellings]
        if any(accepted) != test["valid"] and not (test["valid"] and case["name"] in OTHER_ORDER):
            wrong.append(f"{case['name']}: {test['description']}")
    return wrong


def is_accepted(service: LocalGrammarService, ticket: Any, text: str) -> bool:
    return service.start_matcher(ticket, STOPS).accept([*text.encode(), EOS_TOKEN_ID])


@pytest.mark.parametrize("case", SMALL, ids=[case["name"] for case in SMALL])
def test_a_schema_is_followed_exactly_or_refused_by_name(service: LocalGrammarService, case: dict[str, Any]) -> None:
    try:
        assert misjudged(service, case) == []
    except ConstraintRejected as refused:
        assert refused.message  # noqa: PT017 a refusal is the other legal outcome
        assert refused.param == "structured_outputs"  # noqa: PT017 the same


@pytest.mark.skipif(SHARED is None, reason="PD_SHARED names the folder of the large sample")
def test_the_whole_sample_is_followed_exactly_or_refused_by_name(service: LocalGrammarService) -> None:
    path = Path(str(SHARED)) / "data" / "maskbench_sample.jsonl"
    refused: dict[str, str] = {}
    wrong: list[str] = []
    cases = [json.loads(line) for line in path.read_text().splitlines()]
    for case in cases:
        try:
            wrong += misjudged(service, case)
        except ConstraintRejected as error:
            refused[case["name"]] = error.message
    assert wrong == []
    assert all(refused.values())
    assert len(refused) <= 0.06 * len(cases)


def test_what_cannot_be_enforced_can_be_checked_afterwards_and_says_so() -> None:
    service = make_service(on_inexact="validate")
    try:
        unique = schema('{"type":"array","items":{"type":"integer"},"uniqueItems":true}')
        ticket = settle(service.compile(unique))
        assert ticket.unenforced == ("uniqueItems",)
        assert service.why_invalid(ticket, "[1,2]") is None
        assert "non-unique" in str(service.why_invalid(ticket, "[1,1]"))
        assert "not JSON" in str(service.why_invalid(ticket, "[1,"))
        exact = settle(service.compile(schema('{"type":"array","items":{"type":"integer"}}')))
        assert exact.unenforced == ()
    finally:
        service.close()


def test_by_default_what_cannot_be_enforced_is_refused(service: LocalGrammarService) -> None:
    with pytest.raises(ConstraintRejected, match="uniqueItems"):
        start(service, schema('{"type":"array","uniqueItems":true}'))


@pytest.mark.parametrize(
    "text",
    [
        '{"type":"object","properties":{"a":{"type":"string","pattern":"^[a-z]+$","maxLength":3}},"required":["a"]}',
        '{"type":"array","items":{"type":"string","format":"email","maxLength":10}}',
        '{"type":"string","pattern":"^[a-z]+$","maxLength":3}',
        '{"type":"string","format":"email","maxLength":10}',
    ],
)
def test_pattern_and_format_keep_their_length_bounds(service: LocalGrammarService, text: str) -> None:
    wrap = {"o": ('{"a":"', '"}'), "a": ('["', '"]'), "s": ('"', '"')}[json.loads(text)["type"][0]]
    short, long = ("a@b.cc", "abcdefgh@b.cc") if "email" in text else ("abc", "abcd")
    constraint = schema(text)
    ticket = settle(service.compile(constraint))
    assert is_accepted(service, ticket, short.join(wrap))
    assert not is_accepted(service, ticket, long.join(wrap))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"type":"string","pattern":"^[a-z]+$","maxLength":3}', "`maxLength`, `pattern`"),
        ('{"oneOf":[{"type":"string"},{"minLength":2}]}', "`oneOf`"),
        ('{"type":"number","multipleOf":2}', "`multipleOf`"),
        ('{"type":"object","properties":{"a":{}},"additionalProperties":true}', "undeclared"),
    ],
)
def test_xgrammar_gets_nothing_it_would_weaken(text: str, reason: str) -> None:
    service = make_service(backend="xgrammar")
    try:
        ticket = settle(service.compile(schema(text)))
        assert ticket.error is not None
        assert reason in ticket.error.message
    finally:
        service.close()

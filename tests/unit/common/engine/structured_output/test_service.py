"""The service as the engine sees it: tickets, cache, stops, masks. Languages: the backends' own tests."""

import pytest

from common.engine.structured_output.grammar import CompileState, MaskRow
from common.engine.structured_output.service import LocalGrammarService
from common.errors import ConstraintRejected
from common.wire.constraint import Constraint, ConstraintKind
from tests.support.byte_tokenizer import EOS_TOKEN_ID, SPECIAL_TOKENS
from tests.support.grammars import STOPS, accepts, allowed, make_service, schema, settle, start

PERSON = '{"type":"object","properties":{"x":{"type":"integer"}},"required":["x"],"additionalProperties":false}'
PAD = SPECIAL_TOKENS["<|pad|>"]


def test_a_schema_is_followed_to_its_end_and_the_stop_token_terminates(service: LocalGrammarService) -> None:
    matcher = start(service, schema(PERSON))
    assert matcher.accept(list(b'{"x":12}'))
    assert matcher.can_end()
    assert not matcher.is_terminated()
    assert allowed(service, matcher) == {EOS_TOKEN_ID}
    assert matcher.accept([EOS_TOKEN_ID])
    assert matcher.is_terminated()
    assert not matcher.accept(list(b" "))


def test_a_refused_token_leaves_the_state_as_before_it(service: LocalGrammarService) -> None:
    matcher = start(service, schema(PERSON))
    assert not matcher.accept(list(b'{"y'))
    assert matcher.accept(list(b'x":1}'))


def test_every_stop_id_is_masked_until_the_grammar_may_end(service: LocalGrammarService) -> None:
    stops = frozenset({EOS_TOKEN_ID, PAD})
    matcher = start(service, schema(PERSON), stops)
    for byte in b'{"x":1':
        assert not stops & allowed(service, matcher)
        assert not matcher.accept([PAD])
        assert matcher.accept([byte])
    assert matcher.accept(list(b"}"))
    assert allowed(service, matcher) == stops
    assert matcher.accept([PAD])
    assert matcher.is_terminated()


def test_a_text_token_used_as_stop_is_masked_until_the_end_and_ends_there(service: LocalGrammarService) -> None:
    constraint = Constraint(kind=ConstraintKind.REGEX, value="a[ab]*")
    matcher = start(service, constraint, frozenset({EOS_TOKEN_ID, ord("a")}))
    assert ord("a") not in allowed(service, matcher)
    matcher = start(service, constraint, frozenset({EOS_TOKEN_ID, ord("b")}))
    assert allowed(service, matcher) == {ord("a")}
    assert matcher.accept(list(b"ab"))
    assert matcher.is_terminated()


def test_equal_constraints_share_one_compilation_and_then_the_cache(service: LocalGrammarService) -> None:
    constraint = schema('{"type":"string","maxLength":7}')
    first = service.compile(constraint)
    settle(first)
    second = service.compile(constraint)
    assert second.state is CompileState.READY
    assert second.compile_s == 0.0
    assert second.backend == first.backend


def test_a_failed_ticket_carries_the_reason_and_the_field_and_is_remembered(service: LocalGrammarService) -> None:
    constraint = schema('{"type":"strin"}', field="response_format.json_schema.schema")
    for _ in range(2):
        ticket = settle(service.compile(constraint))
        assert ticket.state is CompileState.FAILED
        assert isinstance(ticket.error, ConstraintRejected)
        assert ticket.error.param == "response_format.json_schema.schema"
        assert "strin" in ticket.error.message
    relabelled = settle(service.compile(schema('{"type":"strin"}', field="structured_outputs.json")))
    assert relabelled.error is not None
    assert relabelled.error.param == "structured_outputs.json"


def test_callbacks_of_a_settled_ticket_run_at_once(service: LocalGrammarService) -> None:
    ticket = settle(service.compile(schema(PERSON)))
    called: list[bool] = []
    ticket.on_settled(lambda: called.append(True))
    assert called == [True]


def test_masks_come_in_the_order_of_the_rows(service: LocalGrammarService) -> None:
    digits = start(service, Constraint(kind=ConstraintKind.REGEX, value="[0-9]+"))
    letters = start(service, Constraint(kind=ConstraintKind.REGEX, value="[a-z]+"))
    tag = start(service, Constraint(kind=ConstraintKind.GRAMMAR, value='root ::= "<" [a-z]+ ">"'))
    more = start(service, Constraint(kind=ConstraintKind.REGEX, value="[a-z]+"))
    rows = [MaskRow(5, letters), MaskRow(0, tag), MaskRow(3, digits), MaskRow(1, more)]
    masks = service.fill(rows).wait()
    assert masks.shape == (4, 9)
    assert masks[0].equal(masks[3])
    assert [
        bool(masks[row, ord(byte) // 32] >> (ord(byte) % 32) & 1) for row, byte in ((0, "q"), (1, "<"), (2, "7"))
    ] == [
        True,
        True,
        True,
    ]
    assert not bool(masks[2, ord("q") // 32] >> (ord("q") % 32) & 1)


def test_no_rows_need_no_work(service: LocalGrammarService) -> None:
    assert service.fill([]).wait().shape == (0, 9)


@pytest.mark.parametrize("source", ["[ab]{3}c", 'root ::= [ab] [ab] [ab] "c"'])
def test_rollback_undoes_text_and_the_stop_token(service: LocalGrammarService, source: str) -> None:
    kind = ConstraintKind.GRAMMAR if "::=" in source else ConstraintKind.REGEX
    matcher = start(service, Constraint(kind=kind, value=source))
    assert matcher.accept([*b"abac", EOS_TOKEN_ID])
    matcher.rollback(3)
    assert not matcher.is_terminated()
    assert allowed(service, matcher) == {ord("a"), ord("b")}
    assert matcher.accept([*b"bc", EOS_TOKEN_ID])
    with pytest.raises(ValueError, match="cannot undo"):
        matcher.rollback(6)


@pytest.mark.parametrize("source", ["[ab]{3}c", 'root ::= [ab] [ab] [ab] "c"'])
def test_validate_counts_leading_tokens_and_changes_nothing(service: LocalGrammarService, source: str) -> None:
    kind = ConstraintKind.GRAMMAR if "::=" in source else ConstraintKind.REGEX
    matcher = start(service, Constraint(kind=kind, value=source))
    assert matcher.accept(list(b"a"))
    assert matcher.validate([*b"bbc", EOS_TOKEN_ID, EOS_TOKEN_ID]) == 4
    assert matcher.validate([*b"bx"]) == 1
    assert matcher.validate([EOS_TOKEN_ID]) == 0
    assert matcher.validate([]) == 0
    assert matcher.accept([*b"bbc", EOS_TOKEN_ID])
    assert matcher.validate([*b"a"]) == 0


def test_a_cache_too_small_for_a_grammar_still_serves_it() -> None:
    service = make_service(cache_bytes=1)
    try:
        assert accepts(service, schema(PERSON), '{"x":1}')
        ticket = settle(service.compile(schema(PERSON)))
        assert ticket.state is CompileState.READY
        assert service.start_matcher(ticket, STOPS).accept(list(b'{"x"'))
    finally:
        service.close()

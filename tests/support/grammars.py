"""Helpers of the grammar tests: wait for a ticket, walk a text through a matcher by its masks."""

import threading

import numpy as np

from common.clock import SystemClock
from common.config.engine import GrammarConfig
from common.engine.structured_output.grammar import GrammarTicket, MaskRow, Matcher
from common.engine.structured_output.service import LocalGrammarService
from common.wire.constraint import Constraint, ConstraintKind
from tests.support.byte_tokenizer import EOS_TOKEN_ID, ByteTokenizer

STOPS = frozenset({EOS_TOKEN_ID})
SETTLE_TIMEOUT_S = 60.0


def make_service(
    tokenizer: ByteTokenizer | None = None, *, thinking_marks: tuple[str, str] | None = None, **settings: object
) -> LocalGrammarService:
    """A service over the byte tokenizer, or one like it."""
    config = GrammarConfig(**settings)
    return LocalGrammarService(tokenizer or ByteTokenizer(), config, SystemClock(), thinking_marks=thinking_marks)


def schema(text: str, **options: object) -> Constraint:
    return Constraint(kind=ConstraintKind.JSON_SCHEMA, value=text, **options)


def settle(ticket: GrammarTicket) -> GrammarTicket:
    """Block until `ticket` is READY or FAILED."""
    settled = threading.Event()
    ticket.on_settled(settled.set)
    assert settled.wait(SETTLE_TIMEOUT_S), "the ticket never settled"
    return ticket


def start(service: LocalGrammarService, constraint: Constraint, stops: frozenset[int] = STOPS) -> Matcher:
    """A matcher of `constraint`, compiled now; raises the ticket's error."""
    ticket = settle(service.compile(constraint))
    if ticket.error is not None:
        raise ticket.error
    return service.start_matcher(ticket, stops)


def allowed(service: LocalGrammarService, matcher: Matcher) -> frozenset[int]:
    """Token ids the mask allows now."""
    row = service.fill([MaskRow(0, matcher)]).wait().numpy().view(np.uint32)[0]
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return frozenset(int(token_id) for token_id in np.flatnonzero(bits))


def accepts(service: LocalGrammarService, constraint: Constraint, text: str) -> bool:
    """Whether `text` followed by EOS is in the language, checked by the matcher and, at each byte, by its mask."""
    matcher = start(service, constraint)
    for byte in text.encode():
        in_mask = byte in allowed(service, matcher)
        accepted = matcher.accept([byte])
        assert accepted == in_mask, f"mask and matcher disagree at byte {byte!r} of {text!r}"
        if not accepted:
            return False
    return EOS_TOKEN_ID in allowed(service, matcher) and matcher.accept([EOS_TOKEN_ID])

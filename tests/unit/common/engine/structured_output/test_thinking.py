"""Thinking runs free, the grammar begins behind its end mark, and nothing slips through between the two."""

import random

import pytest

from common.engine.structured_output.grammar import MaskRow, Matcher
from common.engine.structured_output.service import LocalGrammarService
from common.engine.structured_output.thinking import Thinking
from common.wire.constraint import Constraint, ConstraintKind
from tests.support.byte_tokenizer import EOS_TOKEN_ID, ByteTokenizer
from tests.support.grammars import STOPS, allowed, make_service, schema, settle

MARKS = ("<think>", "</think>")
OBJECT = schema('{"type":"object","properties":{"x":{"type":"integer"}},"required":["x"],"additionalProperties":false}')
THOUGHT = 'so {"y": 1} < and </thin> and </ are thoughts'


class WordTokenizer(ByteTokenizer):
    """Bytes, and some longer tokens around the marks."""

    WORDS = (b"</think>", b"ink>", b"ink>{", b"</think>{", b"<think>", b"<think>hm", b"x>", b'{"x"')

    def __init__(self) -> None:
        super().__init__()
        self.first_word = self.vocab_size
        self.vocab_size += len(self.WORDS)
        self.hf_tokenizer_json = None

    def token_bytes(self, token_id: int) -> bytes:
        return self.WORDS[token_id - self.first_word] if token_id >= self.first_word else super().token_bytes(token_id)

    def word(self, text: bytes) -> int:
        return self.first_word + self.WORDS.index(text)


WORDS = WordTokenizer()


@pytest.fixture(scope="module")
def thinker():
    service = make_service(WORDS, thinking_marks=MARKS)
    yield service
    service.close()


def start(service: LocalGrammarService, thinking: Thinking, constraint: Constraint = OBJECT) -> Matcher:
    return service.start_matcher(settle(service.compile(constraint)), STOPS, thinking)


@pytest.mark.parametrize(
    ("thinking", "text", "expected"),
    [
        (Thinking.MAY_BEGIN, '{"x": 1}', True),
        (Thinking.MAY_BEGIN, f'<think>{THOUGHT}</think>{{"x": 1}}', True),
        (Thinking.MAY_BEGIN, "so I think", False),
        (Thinking.MAY_BEGIN, "<thing>", False),
        (Thinking.MAY_BEGIN, '{"x": 1}<think>', False),
        (Thinking.OPEN, f'{THOUGHT}</think>{{"x": 1}}', True),
        (Thinking.OPEN, f'{THOUGHT}</think>{{"y": 1}}', False),
        (Thinking.OPEN, '</think>{"x":1}', True),
        (Thinking.OPEN, '</think></think>{"x":1}', False),
        (Thinking.NONE, '{"x": 1}', True),
        (Thinking.NONE, "<think>", False),
    ],
)
def test_the_grammar_begins_behind_the_thinking(
    thinker: LocalGrammarService, thinking: Thinking, text: str, expected: bool
) -> None:
    matcher = start(thinker, thinking)
    for byte in text.encode():
        may = byte in allowed(thinker, matcher)
        accepted = matcher.accept([byte])
        assert accepted is may
        if not accepted:
            break
    ends = EOS_TOKEN_ID in allowed(thinker, matcher)
    assert (accepted and ends) is expected
    assert matcher.accept([EOS_TOKEN_ID]) is ends


def test_no_stop_token_ends_the_thinking(thinker: LocalGrammarService) -> None:
    matcher = start(thinker, Thinking.OPEN)
    assert EOS_TOKEN_ID not in allowed(thinker, matcher)
    assert not matcher.accept([EOS_TOKEN_ID])
    assert matcher.accept(list(b"x"))


def test_the_mark_and_the_first_token_behind_it_may_come_in_one_step(thinker: LocalGrammarService) -> None:
    matcher = start(thinker, Thinking.OPEN)
    assert matcher.validate([WORDS.word(b"</think>"), WORDS.word(b'{"x"'), ord("1")]) == 2
    assert matcher.accept([WORDS.word(b"</think>"), WORDS.word(b'{"x"')])
    assert allowed(thinker, matcher) >= {ord(":")}
    assert ord("}") not in allowed(thinker, matcher)


def test_a_token_that_runs_over_the_mark_is_never_allowed(thinker: LocalGrammarService) -> None:
    matcher = start(thinker, Thinking.OPEN)
    assert WORDS.word(b"</think>") in allowed(thinker, matcher)
    assert WORDS.word(b"</think>{") not in allowed(thinker, matcher)
    assert WORDS.word(b"ink>{") in allowed(thinker, matcher)
    assert matcher.accept(list(b"</th"))
    assert WORDS.word(b"ink>") in allowed(thinker, matcher)
    assert WORDS.word(b"ink>{") not in allowed(thinker, matcher)
    assert not matcher.accept([WORDS.word(b"ink>{")])
    assert matcher.accept([WORDS.word(b"ink>"), ord("{")])


def test_the_start_mark_may_come_with_the_first_thought(thinker: LocalGrammarService) -> None:
    for first in ([WORDS.word(b"<think>hm")], [WORDS.word(b"<think>")], list(b"<think>")):
        matcher = start(thinker, Thinking.MAY_BEGIN)
        assert first[0] in allowed(thinker, matcher)
        assert matcher.accept(first)
        assert ord("q") in allowed(thinker, matcher)
        assert matcher.accept([WORDS.word(b"</think>"), ord("{")])


@pytest.mark.parametrize("thinking", list(Thinking))
def test_masks_agree_with_the_matcher_and_rollback_restores_both(
    thinker: LocalGrammarService, thinking: Thinking
) -> None:
    chance = random.Random(1)
    for _ in range(6):
        matcher = start(thinker, thinking)
        seen = [allowed(thinker, matcher)]
        for _ in range(30):
            choices = sorted(seen[-1] - STOPS)
            marked = [token for token in choices if token >= WORDS.first_word or token in frozenset(b"</think>")]
            token = chance.choice(marked if marked and chance.random() < 0.7 else choices or [EOS_TOKEN_ID])
            if not choices:
                break
            assert matcher.accept([token])
            seen.append(allowed(thinker, matcher))
        while len(seen) > 1:
            num = min(len(seen) - 1, chance.randint(1, 4))
            matcher.rollback(num)
            del seen[len(seen) - num :]
            assert allowed(thinker, matcher) == seen[-1]


def test_a_grammar_that_begins_like_the_mark_is_followed(thinker: LocalGrammarService) -> None:
    tag = Constraint(kind=ConstraintKind.REGEX, value="<b>[a-z]+</b>")
    matcher = start(thinker, Thinking.MAY_BEGIN, tag)
    assert matcher.accept([*b"<b>x</b>", EOS_TOKEN_ID])


def test_with_enable_in_reasoning_the_grammar_begins_at_once() -> None:
    service = make_service(thinking_marks=MARKS, enable_in_reasoning=True)
    try:
        assert allowed(service, start(service, Thinking.OPEN)) == {ord("{")}
    finally:
        service.close()


def test_rows_that_think_and_rows_that_do_not_share_a_step(thinker: LocalGrammarService) -> None:
    rows = [start(thinker, thinking) for thinking in (Thinking.OPEN, Thinking.NONE, Thinking.MAY_BEGIN)]
    masks = thinker.fill([MaskRow(i, matcher) for i, matcher in enumerate(rows)]).wait().clone()
    for mask, matcher in zip(masks, rows, strict=True):
        assert mask.equal(thinker.fill([MaskRow(0, matcher)]).wait()[0])

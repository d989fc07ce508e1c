import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.detokenizer import Detokenizer
from common.engine.tokenizer import HfTokenizer
from tests.support.byte_tokenizer import EOS_TOKEN_ID, SPECIAL_TOKENS, ByteTokenizer, byte_tokenizer_json

ids = st.lists(st.integers(0, 260), max_size=40)
TOKENIZERS = [ByteTokenizer(), HfTokenizer(byte_tokenizer_json(), frozenset({EOS_TOKEN_ID}))]


def deltas(tokenizer, token_ids, sizes=(), *, skip=True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    rest, shown = list(token_ids), []
    for size in sizes:
        shown.append(detokenizer.push(rest[:size]))
        rest = rest[size:]
    return [*shown, detokenizer.push(rest), detokenizer.flush()]


@settings(max_examples=100, deadline=None)
@given(token_ids=ids, sizes=st.lists(st.integers(0, 4), max_size=20), skip=st.booleans())
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_concatenated_deltas_are_the_full_decode(tokenizer, token_ids, sizes, skip):
    assert "".join(deltas(tokenizer, token_ids, sizes, skip=skip)) == tokenizer.decode(token_ids, skip)


@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=20))
def test_no_delta_of_good_text_holds_a_broken_character(text):
    tokenizer = ByteTokenizer()
    pieces = deltas(tokenizer, text.encode(), [1] * 80)
    assert "".join(pieces) == text
    assert all(piece.encode() for piece in pieces if piece)


def test_a_character_of_four_tokens_comes_whole_with_its_last_token():
    assert deltas(ByteTokenizer(), "🙂!".encode(), [1] * 4) == ["", "", "", "🙂", "!", ""]


def test_an_unfinished_character_is_flushed_at_the_end():
    assert deltas(ByteTokenizer(), "é".encode()[:1]) == ["", "\ufffd"]


def test_special_tokens_are_text_only_when_asked_for_and_nothing_is_put_between_them():
    token_ids = [SPECIAL_TOKENS["<think>"], SPECIAL_TOKENS["</think>"], 97]
    assert "".join(deltas(ByteTokenizer(), token_ids)) == "a"
    assert "".join(deltas(ByteTokenizer(), token_ids, skip=False)) == "<think></think>a"


def test_ids_without_a_token_are_skipped():
    assert "".join(deltas(ByteTokenizer(), [97, 4000, 98])) == "ab"

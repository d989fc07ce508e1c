import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.engine.tokenizer import HfTokenizer, byte_alphabet, piece_bytes
from common.errors import InvalidRequest
from tests.support.byte_tokenizer import SPECIAL_TOKENS, ByteTokenizer

BYTES = ByteTokenizer()
HF = HfTokenizer(BYTES.hf_tokenizer_json or "", BYTES.eos_token_ids)


def test_the_byte_alphabet_names_every_byte_once():
    assert sorted(byte_alphabet().values()) == list(range(256))


@pytest.mark.parametrize(
    ("piece", "byte_level", "expected"),
    [
        ("Ġhi", True, b" hi"),
        ("Ċ", True, b"\n"),
        ("ðŁĺ", True, b"\xf0\x9f\x98"),
        ("not byte level: 日", True, "not byte level: 日".encode()),
        ("▁hi", False, b" hi"),
        ("<0x0A>", False, b"\n"),
        ("日", False, "日".encode()),
    ],
)
def test_pieces_become_the_bytes_they_stand_for(piece, byte_level, expected):
    assert piece_bytes(piece, byte_level=byte_level) == expected


@given(st.text(max_size=40))
def test_text_survives_encoding_and_decoding(text):
    assert HF.encode(text) == BYTES.encode(text)
    assert HF.decode(HF.encode(text), skip_special_tokens=False) == text


@given(st.lists(st.integers(0, 255), max_size=20))
def test_token_bytes_add_up_to_the_decoded_text(ids):
    joined = b"".join(map(HF.token_bytes, ids))
    assert HF.decode(ids) == joined.decode(errors="replace") == BYTES.decode(ids)


def test_special_tokens_in_text_become_their_ids_and_have_no_bytes():
    assert HF.encode("a<|end|>b") == [97, SPECIAL_TOKENS["<|end|>"], 98]
    assert HF.decode([97, 256, 98]) == "ab"
    assert HF.decode([97, 256, 98], skip_special_tokens=False) == "a<|end|>b"
    assert [HF.token_bytes(token_id) for token_id in (256, 5000, -1)] == [b"", b"", b""]
    assert HF.special_token_ids == frozenset(SPECIAL_TOKENS.values())


def test_added_tokens_that_are_not_special_are_text():
    description = json.loads(HF.hf_tokenizer_json)
    description["added_tokens"].append(
        {**description["added_tokens"][0], "id": 261, "content": "<tool call>", "special": False}
    )
    tokenizer = HfTokenizer(json.dumps(description), frozenset({256}))

    assert tokenizer.encode("<tool call>") == [261]
    assert tokenizer.token_bytes(261) == b"<tool call>"
    assert tokenizer.decode([261]) == "<tool call>"
    assert 261 not in tokenizer.special_token_ids
    assert tokenizer.vocab_size == 262


def test_truncation_and_padding_of_the_file_are_ignored():
    description = json.loads(HF.hf_tokenizer_json)
    description["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    tokenizer = HfTokenizer(json.dumps(description), frozenset({256}))

    assert len(tokenizer.encode("longer than two")) == 15


def test_half_a_surrogate_pair_is_the_requests_fault():
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        HF.encode("a\ud800b")


def test_ids_without_a_token_are_skipped():
    assert HF.decode([-1, 97, 2**40, 98]) == "ab"


def test_fingerprints_differ_with_vocabulary_and_ends():
    same = HfTokenizer(HF.hf_tokenizer_json, frozenset({256}))
    other_end = HfTokenizer(HF.hf_tokenizer_json, frozenset({256, 258}))

    assert same.fingerprint == HF.fingerprint
    assert other_end.fingerprint != HF.fingerprint

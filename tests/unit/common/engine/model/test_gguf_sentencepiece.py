import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.model.gguf_sentencepiece import SPACE, merges_by_score, sentencepiece_tokenizer

BYTE_PIECES = {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
PIECES = ("t", "h", "e", SPACE, "th", "the", f"{SPACE}t", f"{SPACE}the", "he", "ee", "hee", f"{SPACE}{SPACE}", "\n")


def vocabulary(scores):
    return {"<unk>": 0, "<s>": 1, "</s>": 2, **BYTE_PIECES, **{piece: 259 + i for i, piece in enumerate(scores)}}


def merge_by_definition(text, scores):
    """SentencePiece's own procedure: again and again the neighbours with the best union, the leftmost of equals."""
    symbols = list(text)
    while True:
        unions = [
            (scores[left + right], -place)
            for place, (left, right) in enumerate(itertools.pairwise(symbols))
            if left + right in scores
        ]
        if not unions:
            return symbols
        place = -max(unions)[1]
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]


@settings(max_examples=60, deadline=None)
@given(order=st.permutations(PIECES), text=st.text("the \n", max_size=24))
def test_pieces_are_merged_as_sentencepiece_merges_them(order, text):
    scores = {piece: -float(rank) for rank, piece in enumerate(order)}
    tokenizer = sentencepiece_tokenizer(vocabulary(scores), scores, "<unk>", space_prefix=True)

    encoded = tokenizer.encode(text)

    assert encoded.tokens == (merge_by_definition(SPACE + text.replace(" ", SPACE), scores) if text else [])
    assert tokenizer.decode(encoded.ids) == text


def test_what_is_not_in_the_vocabulary_is_spelled_in_bytes():
    scores = {piece: -float(rank) for rank, piece in enumerate(PIECES)}
    tokenizer = sentencepiece_tokenizer(vocabulary(scores), scores, "<unk>", space_prefix=False)

    encoded = tokenizer.encode("the 日")

    assert encoded.tokens == ["the", SPACE, "<0xE6>", "<0x97>", "<0xA5>"]
    assert tokenizer.decode(encoded.ids) == "the 日"


def test_only_pieces_of_two_known_pieces_are_merged():
    assert merges_by_score({"a": 0.0, "b": 0.0, "ab": -2.0, "abc": -1.0, "aab": -3.0}) == [("a", "b"), ("a", "ab")]

"""Filling many rows where one library call goes wrong."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from common.engine.structured_output.backend import FillRow
from common.engine.structured_output.bitmask import BitmaskFiller
from common.engine.structured_output.grammar import MaskRow
from common.engine.structured_output.request_matcher import RequestMatcher
from common.engine.structured_output.vocabulary import Int32Array, Vocabulary, read_vocabulary
from tests.support.byte_tokenizer import ByteTokenizer


class Panic(BaseException):
    """As a native library's panic reaches Python: no `Exception`."""


@dataclass
class Stub:
    """A matcher that is allowed `token` (again and again), or breaks the library."""

    token: int | None
    breaks_on: str = ""
    num_consumed: int = 0

    def consume(self, token_id: int) -> bool:
        if self.breaks_on == "consume":
            raise Panic
        self.num_consumed += token_id == self.token
        return token_id == self.token

    def validate(self, token_ids: Sequence[int]) -> int:
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        if self.breaks_on == "rollback":
            raise Panic
        self.num_consumed -= num_tokens

    def forced(self) -> Sequence[int]:
        return ()

    def can_end(self) -> bool:
        return False


class BreakableBackend:
    name = "breakable"

    def compile(self, constraint: object) -> object:
        raise NotImplementedError

    def fill(self, rows: Sequence[FillRow], bitmask: Int32Array) -> None:
        for row in rows:
            assert isinstance(row.matcher, Stub)
            if row.matcher.token is None:
                raise Panic
            bitmask[row.row] = 0
            bitmask[row.row, row.matcher.token // 32] = 1 << (row.matcher.token % 32)


class OneBackend:
    def get(self, name: str) -> BreakableBackend:
        assert name == "breakable"
        return BreakableBackend()


def request_matcher(vocabulary: Vocabulary, token: int | None, breaks_on: str = "") -> RequestMatcher:
    return RequestMatcher(Stub(token, breaks_on), "breakable", frozenset(), vocabulary.word_mask(()))


def allowed_by(rows: Sequence[MaskRow], vocabulary: Vocabulary) -> list[list[int]]:
    """Tokens that each mask row allows."""
    filler = BitmaskFiller(vocabulary, OneBackend(), pin_memory=False)  # type: ignore[arg-type]  # needs `get` only
    try:
        masks = filler.fill(rows).wait().numpy()
    finally:
        filler.close()
    return [np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist() for row in masks]


def test_a_library_that_breaks_on_one_row_leaves_the_others_their_masks() -> None:
    vocabulary = read_vocabulary(ByteTokenizer())
    rows = [MaskRow(i, request_matcher(vocabulary, token)) for i, token in enumerate((5, None, 40))]
    assert allowed_by(rows, vocabulary) == [[5], [], [40]]


def test_rows_behind_a_draft_follow_their_own_and_the_matcher_stands_where_it_stood() -> None:
    vocabulary = read_vocabulary(ByteTokenizer())
    matchers = [request_matcher(vocabulary, token) for token in (5, 40)]
    rows = [MaskRow(0, matchers[0], (5, 5)), MaskRow(3, matchers[1])]
    assert allowed_by(rows, vocabulary) == [[5], [5], [5], [40]]
    assert [matcher.inner.num_consumed for matcher in matchers if isinstance(matcher.inner, Stub)] == [0, 0]


@pytest.mark.parametrize(("breaks_on", "its_rows"), [("consume", [[5], [], []]), ("rollback", [[], [], []])])
def test_a_library_that_breaks_behind_a_draft_leaves_the_others_their_masks(
    breaks_on: str, its_rows: list[list[int]]
) -> None:
    vocabulary = read_vocabulary(ByteTokenizer())
    rows = [
        MaskRow(0, request_matcher(vocabulary, 5, breaks_on), (5, 5)),
        MaskRow(3, request_matcher(vocabulary, 40), (40,)),
    ]
    assert allowed_by(rows, vocabulary) == [*its_rows, [40], [40]]

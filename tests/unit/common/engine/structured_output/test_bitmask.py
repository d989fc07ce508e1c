"""Filling many rows where one library call goes wrong."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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
    """A matcher that is allowed `token`, or breaks the library."""

    token: int | None

    def consume(self, token_id: int) -> bool:
        return token_id == self.token

    def validate(self, token_ids: Sequence[int]) -> int:
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        del num_tokens

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


def request_matcher(vocabulary: Vocabulary, token: int | None) -> RequestMatcher:
    return RequestMatcher(Stub(token), "breakable", frozenset(), vocabulary.word_mask(()))


def test_a_library_that_breaks_on_one_row_leaves_the_others_their_masks() -> None:
    vocabulary = read_vocabulary(ByteTokenizer())
    filler = BitmaskFiller(vocabulary, OneBackend(), pin_memory=False)  # type: ignore[arg-type]  # needs `get` only
    try:
        rows = [MaskRow(i, request_matcher(vocabulary, token)) for i, token in enumerate((5, None, 40))]
        masks = filler.fill(rows).wait().numpy()
        allowed = [np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist() for row in masks]
        assert allowed == [[5], [], [40]]
    finally:
        filler.close()

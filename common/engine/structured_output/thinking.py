"""Thinking before the constrained text: it runs free, and the grammar begins behind the end marker.

    <think>  anything at all  </think>{"x": 1}
    |  MAY_BEGIN: this mark,  |       ^ the grammar's first token
    |  or the grammar at once OPEN: the prompt has opened the thinking

Owns: where a sequence stands between the marks, and what is allowed there. By text, not by token ids: a mark may be one
token or several. No token may hold the end mark's last character and something behind it: the grammar would not have
seen that. No stop token while thinking. Does not know: which library follows the grammar, stop tokens.
"""

from collections import defaultdict
from collections.abc import Sequence
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.engine.structured_output.backend import BackendMatcher
    from common.engine.structured_output.vocabulary import UInt32Array, Vocabulary


class Thinking(Enum):
    """What may stand before the constrained text of a request."""

    NONE = "none"
    MAY_BEGIN = "may_begin"
    OPEN = "open"


class ThinkingMarks:
    """The marks over one vocabulary: which tokens open the thinking, which ones do not fit its end.

    Args:
        start, end: the marks' text.
        vocabulary: the token table.
    """

    def __init__(self, start: str, end: str, vocabulary: "Vocabulary") -> None:
        self.start, self.end = start.encode(), end.encode()
        self.token_bytes = vocabulary.token_bytes
        by_first_byte: defaultdict[int, list[int]] = defaultdict(list)
        for token_id, text in enumerate(self.token_bytes):
            if text:
                by_first_byte[text[0]].append(token_id)
        self._opening = [
            vocabulary.word_mask(filter(partial(self._opens, place), by_first_byte[byte]))
            for place, byte in enumerate(self.start)
        ]
        inside = vocabulary.word_mask(range(vocabulary.size)) & ~vocabulary.word_mask([vocabulary.end_token_id])
        within = [token_id for token_id, text in enumerate(self.token_bytes) if self._runs_on(text)]
        self._inside = [inside & ~vocabulary.word_mask(within)]
        self._inside += [
            ~vocabulary.word_mask(filter(partial(self._runs_over, place), by_first_byte[byte]))
            for place, byte in enumerate(self.end)
            if place
        ]

    def opening(self, num_seen: int) -> "UInt32Array":
        """Mask row of the tokens that go on with the start mark behind its first `num_seen` bytes."""
        return self._opening[num_seen]

    def inside(self, tail: bytes) -> "UInt32Array":
        """Mask row while thinking, `tail` being the text so far, at least as much of it as the end mark is long."""
        row = self._inside[0].copy()
        for place in range(1, len(self.end)):
            if tail.endswith(self.end[:place]):
                row &= self._inside[place]
        return row

    def _opens(self, place: int, token_id: int) -> bool:
        """Whether the token goes on with the start mark from byte `place` on; what is behind the mark is a thought."""
        rest, text = self.start[place:], self.token_bytes[token_id]
        return rest.startswith(text) or (text.startswith(rest) and self.end not in text)

    def _runs_over(self, place: int, token_id: int) -> bool:
        """Whether the token completes the end mark from byte `place` on, and says more."""
        rest, text = self.end[place:], self.token_bytes[token_id]
        return len(text) > len(rest) and text.startswith(rest)

    def _runs_on(self, text: bytes) -> bool:
        """Whether a token holds the whole end mark, and more behind it."""
        return self.end in text and text.index(self.end) + len(self.end) != len(text)


class _Place(Enum):
    START = "start"
    OPENING = "opening"  # a part of the start mark has been written
    INSIDE = "inside"
    AFTER = "after"


class ThinkingMatcher:
    """A `BackendMatcher` that lets thinking pass before `inner` begins.

    Args:
        inner: follows the constrained text.
        marks: of the model.
        is_open: the prompt has opened the thinking.
    """

    def __init__(self, inner: "BackendMatcher", marks: ThinkingMarks, *, is_open: bool) -> None:
        self.inner = inner
        self._marks = marks
        self._place = _Place.INSIDE if is_open else _Place.START
        self._text = b""
        self._before: list[tuple[_Place, bytes]] = []  # the state before each token that `inner` did not see
        self._num_inner = 0

    @property
    def is_after(self) -> bool:
        """Whether `inner` alone says what is allowed."""
        return self._place is _Place.AFTER

    @property
    def may_be_inner(self) -> bool:
        """Whether what `inner` allows is allowed (`own_row` is allowed, too, unless `is_after`)."""
        return self._place in (_Place.START, _Place.AFTER)

    def own_row(self) -> "UInt32Array":
        """Mask row of the tokens that belong to the thinking and its marks."""
        if self._place is _Place.INSIDE:
            return self._marks.inside(self._text)
        return self._marks.opening(len(self._text))

    def consume(self, token_id: int) -> bool:
        """Advance by one text token."""
        if self.may_be_inner and self.inner.consume(token_id):
            self._place = _Place.AFTER
            self._num_inner += 1
            return True
        text = self._marks.token_bytes[token_id]
        found = None if self.is_after else self._step(self._text + text, len(text))
        if found is None:
            return False
        self._before.append((self._place, self._text))
        self._place, self._text = found
        return True

    def _step(self, text: bytes, num_new: int) -> tuple[_Place, bytes] | None:
        """The state after `text`, whose last `num_new` bytes are new; None when they do not fit."""
        start, end = self._marks.start, self._marks.end
        if self._place is not _Place.INSIDE:
            if not num_new:
                return None
            if len(text) < len(start):
                return (_Place.OPENING, text) if start.startswith(text) else None
            if not text.startswith(start) or end in text[len(start) :]:
                return None
            return _Place.INSIDE, text[len(start) :][-len(end) :]
        place = text.find(end)
        if place < 0:
            return _Place.INSIDE, text[-len(end) :]
        return (_Place.AFTER, b"") if place + len(end) == len(text) else None

    def validate(self, token_ids: Sequence[int]) -> int:
        """How many leading text tokens would be accepted. The state is unchanged."""
        if self.is_after:
            return self.inner.validate(token_ids)
        num_accepted = 0
        for token_id in token_ids:
            if not self.consume(token_id):
                break
            num_accepted += 1
        self.rollback(num_accepted)
        return num_accepted

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` consumed tokens."""
        num_inner = min(num_tokens, self._num_inner)
        if num_inner:
            self.inner.rollback(num_inner)
            self._num_inner -= num_inner
            if not self._num_inner and not self._before:
                self._place = _Place.START
        for _ in range(num_tokens - num_inner):
            self._place, self._text = self._before.pop()

    def forced(self) -> Sequence[int]:
        """What `inner` must say; thinking is free."""
        return self.inner.forced() if self.is_after else ()

    def can_end(self) -> bool:
        """Whether the text so far is complete."""
        return self.may_be_inner and self.inner.can_end()

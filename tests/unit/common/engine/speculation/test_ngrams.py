"""What followed the same tokens before."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from common.engine.speculation.ngrams import NgramIndex

TEXT = [1, 2, 3, 4, 9, 1, 2, 3]


def test_what_followed_the_tail_before_is_the_draft() -> None:
    assert NgramIndex(2, 4).draft(TEXT, 3) == (4, 9, 1)


def test_a_tail_that_is_new_gives_no_draft() -> None:
    assert NgramIndex(2, 4).draft([1, 2, 3, 4, 5], 3) == ()
    assert NgramIndex(2, 4).draft([1, 2], 3) == ()
    assert NgramIndex(2, 4).draft([], 3) == ()


def test_the_longest_equal_past_wins_over_the_latest_place() -> None:
    text = [7, 1, 2, 50, 8, 1, 2, 60, 7, 1, 2]
    assert NgramIndex(2, 3).draft(text, 1) == (50,)
    assert NgramIndex(2, 2).draft(text, 1) == (60,), "without a longer look the latest place wins"


def test_a_text_that_repeats_itself_goes_on_in_circles() -> None:
    assert NgramIndex(2, 4).draft([5, 6, 5, 6, 5, 6], 5) == (5, 6, 5, 6, 5)


@pytest.mark.parametrize("limit", [0, -3])
def test_nothing_is_drafted_where_there_is_no_room(limit: int) -> None:
    assert NgramIndex(2, 4).draft(TEXT, limit) == ()


def slow_draft(text: list[int], min_tokens: int, max_tokens: int, limit: int) -> tuple[int, ...]:
    """The definition: among the eight latest places, the longest match, then the latest."""
    end = len(text)
    tail = text[end - min_tokens :]
    places = [place for place in range(min_tokens, end) if text[place - min_tokens : place] == tail][-8:]
    best, best_length = None, 0
    for place in reversed(places):
        length = min_tokens
        while length < min(max_tokens, place) and text[place - 1 - length] == text[end - 1 - length]:
            length += 1
        if length > best_length:
            best, best_length = place, length
    if best is None:
        return ()
    period = text[best:end]
    return tuple(period[step % len(period)] for step in range(limit))


@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    min_tokens=st.integers(1, 3),
    more=st.integers(0, 3),
    cuts=st.sets(st.integers(1, 60)),
)
def test_an_index_that_grows_in_any_steps_drafts_as_the_definition_says(
    text: list[int], min_tokens: int, more: int, cuts: set[int]
) -> None:
    index = NgramIndex(min_tokens, min_tokens + more)
    for end in sorted(cut for cut in cuts if cut < len(text)):
        index.draft(text[:end], 2)
    assert index.draft(text, 4) == slow_draft(text, min_tokens, min_tokens + more, 4)

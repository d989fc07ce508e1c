from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.stop_strings import StopScanner

text = st.text("abc", max_size=30)
stops = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3)


def run(pieces: list[str], stop_strings: list[str], *, include_stop: bool = False) -> tuple[list[str], str | None]:
    scanner = StopScanner(stop_strings, include_stop=include_stop)
    shown = []
    for piece in pieces:
        scanned = scanner.push(piece)
        shown.append(scanned.text)
        if scanned.stop is not None:
            return shown, scanned.stop
    return [*shown, scanner.flush()], None


@settings(max_examples=200, deadline=None)
@given(text=text, stop_strings=stops, cuts=st.lists(st.integers(0, 30)), include_stop=st.booleans())
def test_how_the_text_is_cut_into_pieces_never_matters(text, stop_strings, cuts, include_stop):
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(places)]
    shown, stop = run(pieces, stop_strings, include_stop=include_stop)
    whole, same_stop = run([text], stop_strings, include_stop=include_stop)
    assert ("".join(shown), stop) == ("".join(whole), same_stop)


@settings(max_examples=200, deadline=None)
@given(text=text, stop_strings=stops)
def test_nothing_shown_ever_contains_a_stop_string_or_the_start_of_the_one_that_ended_it(text, stop_strings):
    shown, stop = run(list(text), stop_strings)
    result = "".join(shown)
    assert not any(each in result for each in stop_strings)
    if stop is None:
        assert result == text
    else:
        assert text.startswith(result + stop)


def test_the_stop_string_that_is_complete_first_wins_and_of_those_the_longest():
    assert run(["xabcdef"], ["abcdef", "cd"]) == (["xab"], "cd")
    assert run(["xabcd"], ["cd", "abcd"]) == (["x"], "abcd")


def test_only_what_may_begin_a_stop_string_is_held_back():
    scanner = StopScanner(["DEFGHIJ"])
    assert [scanner.push(piece).text for piece in ("ABC", "DE", "FG", "X", "DEF")] == ["ABC", "", "", "DEFGX", ""]
    assert scanner.flush() == "DEF"


def test_an_included_stop_string_is_shown_and_what_follows_it_is_not():
    assert run(["one END two"], ["END"], include_stop=True) == (["one END"], "END")


def test_a_match_may_not_end_where_the_output_may_not_end_yet():
    scanner = StopScanner(["END"])
    assert scanner.push("END E", may_stop=False).stop is None
    scanned = scanner.push("ND more")
    assert scanned.stop == "END"


@pytest.mark.parametrize("pieces", [["a", "b"], ["ab"]])
def test_without_stop_strings_text_passes_at_once(pieces):
    assert run(pieces, []) == ([*pieces, ""], None)

import itertools

from hypothesis import given
from hypothesis import strategies as st

from common.openai import sse


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(c % (len(data) + 1) for c in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


CUTS = st.lists(st.integers(0, 10_000), max_size=8)
LINE = st.text(alphabet="abd: {}[]DONEt", max_size=14).map(str.encode)
EVENTS = st.lists(st.lists(LINE, min_size=1, max_size=3).map(b"\n".join), max_size=5)


@given(EVENTS, CUTS, st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_payloads_do_not_depend_on_how_the_bytes_were_cut(events: list[bytes], cuts: list[int], eol: bytes) -> None:
    lines = [b"".join(b"data: " + line + b"\n" for line in event.split(b"\n")) + b"\n" for event in events]
    stream = b": comment\n\n" + b"".join(lines)
    parser = sse.SseParser()
    payloads = [p for piece in cut(stream.replace(b"\n", eol), cuts) for p in parser.push(piece)]
    payloads += parser.push(b"\n")
    assert payloads == events


@given(EVENTS, CUTS, st.booleans())
def test_the_hold_passes_everything_up_to_the_done_line_and_nothing_of_it(
    events: list[bytes], cuts: list[int], is_done: bool
) -> None:
    before = b"".join(sse.encode_event(event.replace(b"\n", b" ")) for event in events)
    before = before.replace(sse.DONE_LINE, b"data: [done]")
    after = sse.DONE if is_done else b""
    hold = sse.DoneHold()
    passed = b"".join(hold.push(piece) for piece in cut(before + after, cuts))
    assert hold.found is is_done
    assert passed == before
    assert hold.release() == after


def test_the_hold_gives_back_a_line_that_only_began_like_the_marker() -> None:
    hold = sse.DoneHold()
    assert hold.push(b"data: [DO") == b""
    assert hold.push(b"G]\n\n") == b"data: [DOG]\n\n"
    assert not hold.found


def test_the_marker_inside_a_line_is_text() -> None:
    hold = sse.DoneHold()
    assert hold.push(b"data: x data: [DONE]\n") == b"data: x data: [DONE]\n"
    assert hold.push(b"abc") == b"abc"
    assert hold.push(b"data: [DONE]") == b"data: [DONE]"
    assert not hold.found


def test_the_tail_knows_what_must_come_before_the_next_event() -> None:
    for relayed, separator in (
        ([], b""),
        ([b"data: {}\n\n"], b""),
        ([b"data: {}\r\n\r\n"], b""),
        ([b"data: {}\n"], b"\n"),
        ([b'data: {"a'], b"\n\n"),
        ([b"data: {}\n", b"\n"], b""),
    ):
        tail = sse.StreamTail()
        for piece in relayed:
            tail.push(piece)
        assert tail.separator == separator


def test_the_tail_sees_the_end_marker_however_it_was_cut() -> None:
    for pieces in ([sse.DONE], [b"data: x\n\ndata: [DO", b"NE]", b"\n\n"], [b"data: [DONE]\r\n\r\n"]):
        tail = sse.StreamTail()
        for piece in pieces:
            tail.push(piece)
        assert tail.is_done
    assert not sse.StreamTail().is_done

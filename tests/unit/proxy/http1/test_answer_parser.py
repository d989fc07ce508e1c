import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.http1.answer_parser import AnswerParser, LastHead
from proxy.http1.body_parser import Malformed

CUTS = st.lists(st.integers(0, 10_000), max_size=8)
PIECES = st.lists(st.binary(min_size=1, max_size=40), max_size=5)


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(c % (len(data) + 1) for c in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


def read(data: list[bytes]) -> tuple[AnswerParser, bytes]:
    parser = AnswerParser()
    return parser, b"".join(piece for part in data for piece in parser.feed(part))


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-A:  b \r\n"


@given(PIECES, CUTS, st.sampled_from([b"", b";x=1", b" "]), st.sampled_from([b"", b"Trailer: x\r\n"]))
def test_a_chunked_body_does_not_depend_on_how_the_bytes_were_cut(
    pieces: list[bytes], cuts: list[int], extension: bytes, trailer: bytes
) -> None:
    chunks = b"".join(b"%x%s\r\n%s\r\n" % (len(piece), extension, piece) for piece in pieces)
    wire = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n" + trailer + b"\r\n"
    parser, body = read(cut(wire, cuts))
    assert body == b"".join(pieces)
    assert (parser.status, parser.headers["x-a"]) == (200, "b")
    assert parser.is_done
    assert parser.keeps_alive


@given(st.binary(max_size=60), CUTS)
def test_a_body_of_known_length_does_not_depend_on_how_the_bytes_were_cut(body: bytes, cuts: list[int]) -> None:
    wire = b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    parser, got = read(cut(wire, cuts))
    assert (got, parser.is_done, parser.keeps_alive) == (body, True, True)


def test_a_body_without_length_ends_with_the_connection() -> None:
    parser, body = read([HEAD + b"\r\nabc", b"def"])
    assert (body, parser.is_done, parser.keeps_alive) == (b"abcdef", False, False)
    parser.finish()
    assert parser.is_done


@pytest.mark.parametrize("head", [b"HTTP/1.1 204 No Content\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"])
def test_an_answer_without_a_body_is_done_with_its_head(head: bytes) -> None:
    assert read([head])[0].is_done


@pytest.mark.parametrize(
    ("wire", "keeps_alive"),
    [
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 0\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nab", False),
    ],
)
def test_a_connection_is_kept_only_when_nothing_speaks_against_it(wire: bytes, keeps_alive: bool) -> None:
    parser, _ = read([wire])
    assert parser.is_done
    assert parser.keeps_alive is keeps_alive


@pytest.mark.parametrize(
    "wire",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc",
        b"x" * 70_000,
    ],
)
def test_nonsense_is_refused(wire: bytes) -> None:
    with pytest.raises(Malformed):
        read([wire])


@given(CUTS)
def test_a_connection_that_ends_early_is_noticed(cuts: list[int]) -> None:
    wire = HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    for end in range(1, len(wire)):
        parser, _ = read(cut(wire[:end], cuts))
        with pytest.raises(Malformed):
            parser.finish()


HEADS = st.lists(
    st.sampled_from([b"X-A: 1", b"Connection: close", b"Content-Length: 1", b"Content-Length: 2"]), max_size=2
)


@given(HEADS, HEADS)
def test_what_a_connection_remembers_of_its_last_answer_changes_nothing(
    first: list[bytes], second: list[bytes]
) -> None:
    heads = LastHead()
    for lines in (first, second):
        wire = b"HTTP/1.1 200 OK\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\nab"
        fresh, remembering = AnswerParser(), AnswerParser(heads)
        assert fresh.feed(wire) == remembering.feed(wire)
        for name in ("status", "headers", "keeps_alive", "is_done"):
            assert getattr(fresh, name) == getattr(remembering, name)

"""Heads of requests, held against another reader of the same bytes (aiohttp's, which is llhttp)."""

import asyncio
from typing import Any
from urllib.parse import unquote

import pytest
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import BadHttpMethod
from aiohttp.http_parser import HttpRequestParser
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.http1.body_parser import BodyParser, Malformed, Part
from proxy.http1.request_head import HeadReader, RequestHead

HOST = b"Host: h\r\n"


def read(lines: bytes) -> RequestHead:
    return HeadReader().read(lines.removesuffix(b"\r\n"))


def test_names_are_in_lower_case_values_trimmed_and_repeated_ones_joined() -> None:
    head = read(b"POST /a%20b?x=1#y HTTP/1.1\r\nHOST:\t h \r\nX-A: 1\r\nx-a:2\r\nContent-Length: 07\r\n")
    assert (head.method, head.path) == ("POST", "/a b")
    assert head.headers == {"host": "h", "x-a": "1, 2", "content-length": "07"}
    assert (head.num_bytes, head.is_chunked, head.keeps_alive) == (7, False, True)


@pytest.mark.parametrize(
    ("target", "path"), [(b"http://h/a?b", "/a"), (b"http://h", "/"), (b"*", "*"), (b"/a://b#c", "/a://b")]
)
def test_every_form_of_a_target_has_a_path(target: bytes, path: str) -> None:
    assert read(b"GET " + target + b" HTTP/1.1\r\n" + HOST).path == path


@pytest.mark.parametrize(
    ("version", "connection", "keeps_alive"),
    [
        (b"1.1", b"", True),
        (b"1.1", b"Connection: Close\r\n", False),
        (b"1.0", b"", False),
        (b"1.0", b"Connection: Keep-Alive\r\n", True),
    ],
)
def test_who_asks_more_on_the_same_connection(version: bytes, connection: bytes, keeps_alive: bool) -> None:
    assert read(b"GET / HTTP/" + version + b"\r\n" + HOST + connection).keeps_alive is keeps_alive


AMBIGUOUS = [
    b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
    b"Content-Length: 5\r\nContent-Length: 5\r\n",
    b"Content-Length: 5, 5\r\n",
    b"Content-Length: +5\r\n",
    b"Content-Length: -5\r\n",
    b"Content-Length: 5_0\r\n",
    "Content-Length: ٥\r\n".encode(),
    b"Content-Length:\r\n",
    b"Content-Length: 9999999999999999999\r\n",
    b"Content-Length : 5\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n",
    b"Transfer-Encoding: chunked, chunked\r\n",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
    b"Transfer-Encoding: xchunked\r\n",
    b"Transfer-Encoding : chunked\r\n",
    b"Transfer-Encoding: \x0bchunked\r\n",
    b"X: a\r\n folded\r\n",
    b"X: a\n Content-Length: 5\r\n",
    b"X: a\rContent-Length: 5\r\n",
    b"X: a\x00\r\n",
    b"no colon\r\n",
    b": no name\r\n",
    b"Host: again\r\n",
]


@pytest.mark.parametrize("lines", AMBIGUOUS)
def test_what_could_be_read_in_two_ways_is_refused(lines: bytes) -> None:
    with pytest.raises(Malformed):
        read(b"POST / HTTP/1.1\r\n" + HOST + lines)


@pytest.mark.parametrize(
    "line",
    [
        b"GET /",
        b"GET  / HTTP/1.1",
        b" GET / HTTP/1.1",
        b"GET\t/ HTTP/1.1",
        b"GET / HTTP/1.2",
        b"G(T / HTTP/1.1",
        b"GET a HTTP/1.1",
        b"",
    ],
)
def test_what_is_no_request_line_is_refused(line: bytes) -> None:
    with pytest.raises(Malformed):
        read(line + b"\r\n" + HOST)


@pytest.mark.parametrize("size", [b"+3", b"0x3", b"3_", b"", b" ", b"3\n", b"g", b"-1"])
def test_a_chunk_size_that_is_no_plain_hexadecimal_is_refused(size: bytes) -> None:
    with pytest.raises(Malformed):
        BodyParser(Part.CHUNK_SIZE).feed(b"1\r\na\r\n" + size + b"\r\nabc\r\n0\r\n\r\n", 0, [])


HEADERS = st.sampled_from(
    [
        *(b"Host: h\r\n", b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"X-A: b\r\n", b"x-a:\tb \r\n"),
        *(b"Connection: close\r\n", b"Expect: 100-continue\r\n", b"content-length: 0\r\n", b"Accept: */*\r\n"),
    ]
)
LINES = st.sampled_from([b"POST /a HTTP/1.1\r\n", b"GET /a?b HTTP/1.1\r\n", b"PUT /%61 HTTP/1.0\r\n"])
MUTATIONS = st.lists(
    st.tuples(
        st.integers(0, 200), st.sampled_from([b" ", b"\t", b":", b",", b"\r", b"\n", b"\x00", b"5", b"a", b"\xff"])
    ),
    max_size=2,
)


@settings(max_examples=400, deadline=None)
@given(LINES, st.lists(HEADERS, max_size=5), MUTATIONS)
def test_what_is_read_is_read_as_others_read_it(
    line: bytes, headers: list[bytes], mutations: list[tuple[int, bytes]]
) -> None:
    head = line + HOST + b"".join(headers)
    for place, more in mutations:
        at = place % (len(head) + 1)
        head = head[:at] + more + head[at:]
    if b"\r\n\r\n" in head or not head.endswith(b"\r\n"):
        return
    try:
        ours = read(head)
    except Malformed:
        return
    body = b"x" * min(ours.num_bytes, 100)
    sent = b"3\r\nabc\r\n0\r\n\r\n" if ours.is_chunked else body
    try:
        theirs, payload = asyncio.run(others(head + b"\r\n" + sent))
    except BadHttpMethod:
        return  # any name may be one; which are known here is the routes' business
    assert (ours.method, ours.path) == (theirs.method, unquote(theirs.path.partition("?")[0]))
    assert ours.keeps_alive is not theirs.should_close
    assert ours.is_chunked is theirs.chunked
    assert payload == (b"abc" if ours.is_chunked else body)
    joined = {name.lower(): ", ".join(map(readable, theirs.headers.getall(name))) for name in theirs.headers}
    assert ours.headers == joined


def readable(value: str) -> str:
    return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


async def others(wire: bytes) -> tuple[Any, bytes]:
    """What aiohttp reads: the request and as much of its body as is here."""
    loop = asyncio.get_running_loop()
    parser = HttpRequestParser(BaseProtocol(loop), loop, 2**16, max_field_size=2**16)
    messages, _, _ = parser.feed_data(wire)
    message, payload = messages[0]
    return message, payload.read_nowait()

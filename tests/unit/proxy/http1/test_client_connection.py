"""A client's connection, fed by hand."""

import asyncio
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.http1.body_parser import Malformed
from proxy.http1.exchange import BodyTooLarge, Exchange, Reply
from tests.support.wire import answers, connect, echo, server, settle

POST = b"POST /x HTTP/1.1\r\nHost: h\r\n"
BODIES = st.binary(max_size=40)


def sized(body: bytes) -> bytes:
    return POST + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    framed = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return POST + b"Transfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"


REQUESTS = st.lists(
    st.tuples(BODIES, st.integers(0, 9)).map(lambda t: (t[0], chunked(*t) if t[1] else sized(t[0]))), max_size=5
)


@settings(max_examples=60, deadline=None)
@given(REQUESTS, st.lists(st.integers(0, 10_000), max_size=12), st.booleans())
def test_requests_are_answered_in_order_however_their_bytes_were_cut(
    requests: list[tuple[bytes, bytes]], cuts: list[int], gives_way: bool
) -> None:
    wire = b"".join(request for _, request in requests)
    places = sorted({0, len(wire), *(place % (len(wire) + 1) for place in cuts)})

    async def play() -> bytes:
        async with server() as host:
            connection, transport = connect(host)
            for start, end in itertools.pairwise(places):
                connection.data_received(wire[start:end])
                if gives_way:
                    await settle()
            for _ in requests:
                await settle()
            transport.close()
            await settle()
            return transport.written

    got = answers(asyncio.run(play()))
    assert [(status, body) for status, _, body in got] == [(200, body) for body, _ in requests]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.binary(max_size=30)
        | st.sampled_from([sized(b"ab"), chunked(b"abc", 2), POST, b"\r\n\r\n", b"Content-Length: 5\r\n", b"0\r\n"]),
        max_size=8,
    )
)
def test_whatever_arrives_is_answered_or_ends_the_connection_and_breaks_nothing(pieces: list[bytes]) -> None:
    async def play() -> None:
        async with server() as host:
            connection, transport = connect(host)
            for piece in pieces:
                if not transport.is_closing():
                    connection.data_received(piece)
                await settle()
            assert all(status in (200, 400, 431) for status, _, _ in answers(transport.written))
            transport.close()
            await settle()
            another, transport = connect(host)
            another.data_received(sized(b"fine"))
            await settle()
            assert answers(transport.written)[0][2] == b"fine"
            transport.close()
            await settle()

    asyncio.run(play())


@pytest.mark.parametrize(
    ("wire", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 400),  # no host
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET / HTTP/2\r\nHost: a\r\n\r\n", 400),
        (b"SSH-2.0-x\r\n\r\n", 400),
        (b"G\x00T / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"x: " + b"y" * 70_000, 431),
    ],
)
async def test_what_is_no_request_is_refused_in_openais_form_and_ends_the_connection(wire: bytes, status: int) -> None:
    async with server() as host:
        connection, transport = connect(host)
        connection.data_received(wire)
        connection.data_received(sized(b"more"))
        await settle()
        ((got, headers, body),) = answers(transport.written)
        assert (got, headers["connection"], body[:10]) == (status, "close", b'{"error":{')
        assert transport.has_ended
        transport.close()
        await settle()


async def test_a_line_break_too_much_before_a_request_is_forgiven() -> None:
    async with server() as host:
        connection, transport = connect(host)
        connection.data_received(b"\r\n" + sized(b"a"))
        await settle()
        assert answers(transport.written)[0][2] == b"a"


async def test_a_client_that_waits_for_permission_gets_it_when_its_body_is_wanted() -> None:
    async with server() as host:
        connection, transport = connect(host)
        connection.data_received(POST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        await settle()
        assert transport.written == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.data_received(b"ab")
        await settle()
        assert answers(transport.written)[0][2] == b"ab"


async def refuse(http: Exchange) -> None:
    http.send(Reply(b"no", 401))


async def test_an_answer_before_permission_closes_the_connection() -> None:
    async with server(refuse) as host:
        connection, transport = connect(host)
        connection.data_received(POST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        await settle()
        ((status, headers, _),) = answers(transport.written)
        assert (status, headers["connection"]) == (401, "close")


async def test_a_body_that_nobody_read_is_skipped_and_the_next_request_is_served() -> None:
    async with server(refuse) as host:
        connection, transport = connect(host)
        connection.data_received(POST + b"Content-Length: 4\r\n\r\nab")
        await settle()
        connection.data_received(b"cd" + sized(b"next"))
        await settle()
        assert [status for status, _, _ in answers(transport.written)] == [401, 401]
        assert not transport.is_closing()


@pytest.mark.parametrize("head", [b"Content-Length: 9\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n9\r\n"])
async def test_a_body_above_the_cap_is_told_to_the_reader_at_once(head: bytes) -> None:
    seen = []

    async def read(http: Exchange) -> None:
        try:
            await http.read()
        except BodyTooLarge:
            seen.append("too large")
            http.send(Reply(status=413))

    async with server(read, max_body_bytes=8) as host:
        connection, transport = connect(host)
        connection.data_received(POST + head + b"123456789")
        await settle()
        assert (seen, answers(transport.written)[0][0]) == (["too large"], 413)


async def test_a_body_that_is_not_what_it_said_is_told_to_the_reader_and_ends_the_connection() -> None:
    async def read(http: Exchange) -> None:
        with pytest.raises(Malformed):
            await http.read()
        http.send(Reply(status=400))

    async with server(read) as host:
        connection, transport = connect(host)
        connection.data_received(POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n")
        await settle()
        assert answers(transport.written)[0][1]["connection"] == "close"
        assert transport.has_ended


async def test_a_client_that_leaves_stops_whoever_answers_it() -> None:
    stopped = []

    async def hang(http: Exchange) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            stopped.append(True)
            raise

    async with server(hang) as host:
        connection, transport = connect(host)
        connection.data_received(sized(b""))
        await settle()
        transport.close()
        await settle()
        assert stopped == [True]


async def test_a_handler_that_breaks_ends_its_connection_and_no_other() -> None:
    async def broken(http: Exchange) -> None:
        if http.head.path == "/x":
            raise ValueError("a bug")
        http.send(Reply(b"ok"))

    async with server(broken) as host:
        connection, transport = connect(host)
        connection.data_received(sized(b""))
        await settle()
        assert transport.is_closing()
        other, transport = connect(host)
        other.data_received(b"GET /y HTTP/1.1\r\nHost: h\r\n\r\n")
        await settle()
        assert answers(transport.written)[0][2] == b"ok"


async def stream(http: Exchange) -> None:
    http.begin(200, {"X-A": "b"})
    http.write(b"one")
    http.write(b"")
    http.end(b"two")


async def test_a_stream_is_chunked_and_its_connection_stays() -> None:
    async with server(stream) as host:
        connection, transport = connect(host)
        connection.data_received(sized(b""))
        await settle()
        assert transport.written.endswith(b"\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")
        assert not transport.is_closing()


@pytest.mark.parametrize("wishes", [b"", b"Connection: keep-alive\r\n"])
async def test_a_stream_for_an_old_client_has_no_chunks_and_ends_with_its_connection(wishes: bytes) -> None:
    async with server(stream) as host:
        connection, transport = connect(host)
        connection.data_received(b"GET / HTTP/1.0\r\n" + wishes + b"\r\n")
        await settle()
        assert transport.written.endswith(b"Connection: close\r\n\r\nonetwo")
        assert transport.is_closing()


async def test_an_old_client_keeps_its_connection_where_it_asks_to() -> None:
    async with server() as host:
        connection, transport = connect(host)
        connection.data_received(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        await settle()
        assert answers(transport.written)[0][1]["connection"] == "keep-alive"
        assert not transport.is_closing()


async def test_head_is_answered_without_a_body_but_with_its_length() -> None:
    async def answer(http: Exchange) -> None:
        http.send(Reply(b"12345"))

    async with server(answer) as host:
        connection, transport = connect(host)
        connection.data_received(b"HEAD / HTTP/1.1\r\nHost: h\r\n\r\n")
        await settle()
        assert b"Content-Length: 5\r\n" in transport.written
        assert transport.written.endswith(b"\r\n\r\n")


async def test_a_header_with_a_line_break_never_leaves() -> None:
    async def answer(http: Exchange) -> None:
        with pytest.raises(ValueError, match="line break"):
            http.send(Reply(headers={"X-A": "b\r\nSet-Cookie: c"}))
        http.send(Reply(b"ok"))

    async with server(answer) as host:
        connection, transport = connect(host)
        connection.data_received(sized(b""))
        await settle()
        assert b"Set-Cookie" not in transport.written


async def test_more_requests_than_can_be_answered_wait_outside() -> None:
    gate = asyncio.Event()

    async def wait(http: Exchange) -> None:
        await gate.wait()
        await echo(http)

    async with server(wait) as host:
        connection, transport = connect(host)
        for _ in range(3):
            connection.data_received(sized(b"x" * 60_000))
            await settle()
        assert transport.is_reading_paused
        gate.set()
        for _ in range(3):
            await settle()
        assert not transport.is_reading_paused
        assert len(answers(transport.written[:400])) == 1


async def test_a_slow_client_holds_whoever_drains_until_it_has_caught_up() -> None:
    steps = []

    async def answer(http: Exchange) -> None:
        http.begin(200, {})
        http.write(b"a")
        steps.append(http.is_paused)
        await http.drain()
        steps.append("went on")
        http.end()

    async with server(answer) as host:
        connection, _ = connect(host)
        connection.pause_writing()
        connection.data_received(sized(b""))
        await settle()
        assert steps == [True]
        connection.resume_writing()
        await settle()
        assert steps == [True, "went on"]


async def test_stopping_closes_idle_connections_and_the_others_after_their_answer() -> None:
    gate = asyncio.Event()

    async def wait(http: Exchange) -> None:
        await gate.wait()
        http.send(Reply(b"ok"))

    async with server(wait) as host:
        _, idle = connect(host)
        connection, busy = connect(host)
        connection.data_received(sized(b""))
        await settle()
        host.stop_listening()
        await settle()
        assert (idle.is_closing(), busy.is_closing()) == (True, False)
        gate.set()
        await settle()
        assert answers(busy.written)[0][1]["connection"] == "close"
        assert busy.is_closing()


async def test_leaving_a_server_ends_whoever_still_answers_though_the_client_is_gone() -> None:
    steps = []

    async def answers_and_lingers(http: Exchange) -> None:
        http.send(Reply(b"ok"))
        try:
            await asyncio.Event().wait()
        finally:
            steps.append("ended")

    async with server(answers_and_lingers) as host:
        connection, transport = connect(host)
        connection.data_received(sized(b""))
        await settle()
        transport.close()
        await settle()
        assert steps == []
    assert steps == ["ended"]


async def test_a_connection_is_closed_when_a_head_takes_too_long_and_much_later_when_nothing_comes() -> None:
    async with server() as host:
        connection, transport = connect(host)
        now_s = asyncio.get_running_loop().time()
        connection.close_if_older(now_s + 1, now_s - 1)
        assert not transport.is_closing()
        await settle()
        now_s = asyncio.get_running_loop().time()
        connection.data_received(b"POST ")
        connection.close_if_older(now_s, now_s - 1)  # the head is new, however old the connection is
        assert not transport.is_closing()
        connection.close_if_older(now_s + 1, now_s - 1)
        assert transport.is_closing()
        connection, transport = connect(host)
        connection.close_if_older(now_s - 1, now_s + 60)
        assert transport.is_closing()
        await settle()

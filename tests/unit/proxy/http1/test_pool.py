import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from proxy.http1.connection import Broken, Connection
from proxy.http1.pool import Origin, Pool, Unreachable
from tests.support.proxy_rig import until

REQUEST = b"POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Peer:
    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self.num_connections = 0
        self.writers: list[asyncio.StreamWriter] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.writers.append(writer)
        try:
            await self._talk(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def peer(talk: Talk) -> AsyncIterator[tuple[Peer, Pool, Origin]]:
    subject = Peer(talk)
    server = await asyncio.start_server(subject, "127.0.0.1", 0)
    pool = Pool(connect_s=2.0, keepalive_s=60.0)
    try:
        yield subject, pool, Origin("127.0.0.1", server.sockets[0].getsockname()[1])
    finally:
        pool.close()
        server.close()
        await server.wait_closed()


async def polite(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)


async def whole(connection: Connection) -> bytes:
    pieces = []
    while piece := await connection.read_some():
        pieces.append(piece)
    return b"".join(pieces)


async def test_a_connection_is_used_again_after_its_answer_was_read() -> None:
    async with peer(polite) as (server, pool, origin):
        for _ in range(3):
            connection = await pool.exchange(origin, REQUEST)
            assert (connection.status, await whole(connection)) == (200, b"ok")
            pool.give_back(origin, connection)
        assert server.num_connections == 1


async def test_a_connection_whose_answer_was_not_read_is_dropped() -> None:
    gone = asyncio.Event()

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nx")
        await reader.read()
        gone.set()

    async with peer(endless) as (server, pool, origin):
        connection = await pool.exchange(origin, REQUEST)
        pool.give_back(origin, connection)
        await gone.wait()
        assert server.num_connections == 1


async def test_a_connection_that_the_engine_closed_while_idle_is_not_used() -> None:
    async with peer(polite) as (server, pool, origin):
        connection = await pool.exchange(origin, REQUEST)
        await whole(connection)
        pool.give_back(origin, connection)
        server.writers[0].close()
        await until(lambda: connection.is_closed)
        assert (await pool.exchange(origin, REQUEST)).status == 200
        assert server.num_connections == 2


async def test_bytes_that_nobody_asked_for_end_an_idle_connection() -> None:
    async with peer(polite) as (server, pool, origin):
        connection = await pool.exchange(origin, REQUEST)
        await whole(connection)
        pool.give_back(origin, connection)
        server.writers[0].write(OK)
        await until(lambda: connection.is_closed)


async def test_a_connection_that_ends_before_the_answer_is_broken() -> None:
    async def rude(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")

    async with peer(rude) as (_, pool, origin):
        with pytest.raises(Broken):
            await pool.exchange(origin, REQUEST)


async def test_a_connection_that_ends_in_mid_answer_gives_what_came_and_then_breaks() -> None:
    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")

    async with peer(half) as (_, pool, origin):
        connection = await pool.exchange(origin, REQUEST)
        assert await connection.read_some() == b"half"
        with pytest.raises(Broken):
            await connection.read_some()


async def test_nobody_listening_is_unreachable() -> None:
    async with peer(polite) as (_, pool, origin):
        pass
    with pytest.raises(Unreachable):
        await pool.exchange(origin, REQUEST)


async def test_a_sender_faster_than_the_reader_is_held_back() -> None:
    size = 20 << 20

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        for _ in range(size >> 16):
            writer.write(b"x" * (1 << 16))
            await writer.drain()
        await reader.read()

    async with peer(flood) as (_, pool, origin):
        connection = await pool.exchange(origin, REQUEST)
        total = largest = 0
        while piece := await connection.read_some():
            for _ in range(20):
                await asyncio.sleep(0)  # a slow reader
            total += len(piece)
            largest = max(largest, len(piece))
        assert total == size
        assert largest < size / 8
        pool.give_back(origin, connection)


async def test_old_idle_connections_are_closed() -> None:
    async with peer(polite) as (_, _, origin):
        pool = Pool(connect_s=2.0, keepalive_s=0.01)
        connection = await pool.exchange(origin, REQUEST)
        await whole(connection)
        pool.give_back(origin, connection)
        await until(lambda: connection.is_closed)
        pool.close()

"""Clients' connections without sockets: bytes in, bytes out, and a server that answers with what it was sent."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from common.clock import ManualClock
from proxy.http1.answer_parser import AnswerParser
from proxy.http1.client_connection import ClientConnection
from proxy.http1.exchange import Exchange, Reply
from proxy.http1.server import HttpServer


class FakeTransport(asyncio.Transport):
    """Keeps what is written; closing tells the protocol as an event loop would."""

    def __init__(self, protocol: ClientConnection) -> None:
        super().__init__()
        self.written = b""
        self.has_ended = False
        self.is_reading_paused = False
        self._protocol = protocol
        self._is_closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.written += b"".join(list_of_data)

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    def abort(self) -> None:
        self.close()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.has_ended = True

    def pause_reading(self) -> None:
        self.is_reading_paused = True

    def resume_reading(self) -> None:
        self.is_reading_paused = False


async def echo(http: Exchange) -> None:
    """Answer with the body that came."""
    http.send(Reply(await http.read()))


def server(answer: Callable[[Exchange], Awaitable[None]] = echo, max_body_bytes: int = 1 << 20) -> HttpServer:
    return HttpServer(answer, ManualClock(), max_body_bytes=max_body_bytes, head_s=5.0)


def connect(host: HttpServer) -> tuple[ClientConnection, FakeTransport]:
    connection = ClientConnection(host, asyncio.get_running_loop())
    transport = FakeTransport(connection)
    connection.connection_made(transport)
    return connection, transport


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


def answers(written: bytes) -> list[tuple[int, dict[str, str], bytes]]:
    """The answers that lie one behind the other in `written`."""
    found = []
    while written:
        parser, body, used = AnswerParser(), b"", 0
        while used < len(written) and not parser.is_done:
            body += b"".join(parser.feed(written[used : used + 1]))
            used += 1
        found.append((parser.status, parser.headers, body))
        written = written[used:]
    return found

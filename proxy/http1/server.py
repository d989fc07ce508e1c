"""An HTTP/1.1 server: listens, keeps its connections, has every request answered by one function.

Owns: the sockets, the tasks of the requests under way, closing connections that nobody uses. Does not know: routes.
"""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from email.utils import formatdate
from types import TracebackType
from typing import Self

import structlog

from common.clock import Clock
from proxy.http1.client_connection import ClientConnection
from proxy.http1.exchange import Exchange
from proxy.http1.request_head import HeadReader

_log = structlog.get_logger(__name__)
_BACKLOG = 4096
_SWEEP_S = 10.0
_IDLE_S = 3630.0
"""Above what other proxies wait (an hour), so that they close first and never send into a closing connection."""
_CLOSE_S = 2.0


class HttpServer:
    """An async context manager; leaving it ends what is still under way.

    Args:
        answer: answers one request; whatever it raises is logged and ends the connection.
        clock: tells the date.
        max_body_bytes: larger bodies are not kept.
        head_s: how long the head of a request may take to arrive.
    """

    def __init__(
        self, answer: Callable[[Exchange], Awaitable[None]], clock: Clock, *, max_body_bytes: int, head_s: float
    ) -> None:
        self._answer = answer
        self._clock = clock
        self._head_s = head_s
        self._group = asyncio.TaskGroup()
        self._servers: list[asyncio.Server] = []
        self._connections: set[ClientConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._all_gone = asyncio.Event()
        self._sweep: asyncio.TimerHandle | None = None
        self._date = (0, "")
        self.heads = HeadReader()
        self.max_body_bytes = max_body_bytes
        self.is_stopping = False

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_listening()
        for task in self._tasks:
            task.cancel()
        if self._connections:
            self._all_gone.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await self._all_gone.wait()
        for connection in list(self._connections):
            connection.abort()
        if self._sweep is not None:
            self._sweep.cancel()
        # The caller's own failure stays what it is.
        await self._group.__aexit__(None, None, None)

    async def listen(self, host: str, port: int, *, tls: ssl.SSLContext | None = None, reuse_port: bool = False) -> int:
        """Take connections; the port, which the system chooses where `port` is 0.

        Raises:
            OSError: the address cannot be had.
        """
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: ClientConnection(self, loop), host, port, ssl=tls, backlog=_BACKLOG, reuse_port=reuse_port or None
        )
        for listening in server.sockets:
            # Accepted connections inherit it: the system notices clients that are gone without a word.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._servers.append(server)
        bound: int = server.sockets[0].getsockname()[1]
        return bound

    def stop_listening(self) -> None:
        """Take no more connections, and let each go once its request has been answered."""
        self.is_stopping = True
        for server in self._servers:
            server.close()
        self._servers.clear()
        for connection in list(self._connections):
            connection.close()

    def serve(self, exchange: Exchange, connection: ClientConnection) -> asyncio.Task[None]:
        """For connections: have a request answered."""
        task = self._group.create_task(self._serve(exchange, connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _serve(self, exchange: Exchange, connection: ClientConnection) -> None:
        try:
            await self._answer(exchange)
        except ConnectionResetError:
            pass  # the client is gone; there is nobody to answer
        except Exception:  # noqa: BLE001 - one request's failure is never another's
            _log.exception("request.broke", path=exchange.head.path)
            connection.abort()
        finally:
            connection.finished()

    def joined(self, connection: ClientConnection) -> None:
        """For connections: it is open."""
        self._connections.add(connection)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(_SWEEP_S, self._close_old)

    def left(self, connection: ClientConnection) -> None:
        """For connections: it is gone."""
        self._connections.discard(connection)
        if not self._connections:
            self._all_gone.set()

    def date_line(self) -> str:
        """The header that says when, made once a second."""
        second = int(self._clock.wall_s())
        if second != self._date[0]:
            self._date = (second, f"Date: {formatdate(second, usegmt=True)}\r\n")
        return self._date[1]

    def _close_old(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        for connection in list(self._connections):
            connection.close_if_older(now_s - self._head_s, now_s - _IDLE_S)
        self._sweep = loop.call_later(_SWEEP_S, self._close_old) if self._connections else None

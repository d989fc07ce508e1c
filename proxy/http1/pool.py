"""Connections to the engines, kept for the next request.

Owns: who may be reused, for how long, and opening new ones. Does not know: what is asked.
"""

import asyncio
import ssl

import msgspec

from proxy.http1.connection import Broken, Connection


class Unreachable(Exception):
    """No connection could be opened."""


class Origin(msgspec.Struct, frozen=True):
    """Where an engine listens; `tls` is None for plain HTTP."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None


class Pool:
    """Idle connections by origin, the last used first.

    Args:
        connect_s: opening a connection takes at most this long.
        keepalive_s: an idle connection is closed after this long.
    """

    def __init__(self, *, connect_s: float, keepalive_s: float) -> None:
        self._connect_s = connect_s
        self._keepalive_s = keepalive_s
        self._idle: dict[Origin, list[Connection]] = {}
        self._sweep: asyncio.TimerHandle | None = None

    async def exchange(self, origin: Origin, request: bytes) -> Connection:
        """Send `request` on a kept or a new connection and wait for the head of the answer.

        Raises:
            Unreachable: no connection.
            Broken: it ended before an answer began.
        """
        connection = self._take(origin) or await self._open(origin)
        try:
            await connection.send(request)
        except Broken:
            # The others lead to the same process, which has just restarted or closed them all.
            self._drop_idle(origin)
            raise
        except BaseException:
            connection.drop()
            raise
        return connection

    def give_back(self, origin: Origin, connection: Connection) -> None:
        """Keep a connection whose answer was read to its end; drop any other."""
        if not connection.is_reusable:
            connection.drop()
            return
        connection.rest()
        loop = asyncio.get_running_loop()
        connection.idle_since_s = loop.time()
        self._idle.setdefault(origin, []).append(connection)
        if self._sweep is None:
            self._sweep = loop.call_later(self._keepalive_s, self._close_old)

    def close(self) -> None:
        """Close everything that is idle."""
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        for origin in list(self._idle):
            self._drop_idle(origin)

    def _take(self, origin: Origin) -> Connection | None:
        kept = self._idle.get(origin)
        while kept:
            connection = kept.pop()
            if not connection.is_closed:
                return connection
        return None

    async def _open(self, origin: Origin) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(loop), origin.host, origin.port, ssl=origin.tls
                )
        except (OSError, TimeoutError) as error:
            raise Unreachable(str(error) or "timed out") from error
        return connection

    def _drop_idle(self, origin: Origin) -> None:
        for connection in self._idle.pop(origin, []):
            connection.drop()

    def _close_old(self) -> None:
        loop = asyncio.get_running_loop()
        oldest_s = loop.time() - self._keepalive_s
        for origin, kept in list(self._idle.items()):
            young = [c for c in kept if c.idle_since_s > oldest_s and not c.is_closed]
            for connection in kept:
                if connection not in young:
                    connection.drop()
            if young:
                self._idle[origin] = young
            else:
                del self._idle[origin]
        self._sweep = loop.call_later(self._keepalive_s, self._close_old) if self._idle else None

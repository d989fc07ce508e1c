"""One connection to an engine: a request out, an answer in, again.

Owns: the protocol object, waking the one reader, pausing a sender that is faster than the reader.
Does not know: pools, engines, what is in a body.
"""

import asyncio
from typing import cast

from proxy.http1.answer_parser import AnswerParser, Malformed

_HIGH_WATER_BYTES = 256 << 10


class Broken(Exception):
    """The connection ended, or made no sense, before the answer was complete."""


class Connection(asyncio.Protocol):
    """At most one exchange at a time; whoever sends also reads the answer.

    Args:
        loop: the running loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser = AnswerParser()
        self._pieces: list[bytes] = []
        self._num_buffered = 0
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._is_paused = False
        self._is_idle = True
        self.idle_since_s = 0.0

    @property
    def is_closed(self) -> bool:
        """Whether no further request can be sent."""
        return self._transport is None or self._transport.is_closing()

    @property
    def is_reusable(self) -> bool:
        """Whether the answer is complete and the engine keeps the connection open."""
        return self._parser.is_done and self._parser.keeps_alive and not self._pieces and not self.is_closed

    @property
    def status(self) -> int:
        """Status of the answer whose head has been read."""
        return self._parser.status

    @property
    def headers(self) -> dict[str, str]:
        """Headers of that answer, names in lower case."""
        return self._parser.headers

    async def send(self, request: bytes) -> None:
        """Write one request and wait for the head of its answer.

        Raises:
            Broken: the connection ended before.
        """
        if self._transport is None or self._error is not None:
            raise Broken("the connection is closed")
        self._parser = AnswerParser()
        self._is_idle = False
        self._transport.write(request)
        while not self._parser.has_head:
            await self._wait()

    async def read_some(self) -> bytes:
        """Body bytes that have arrived, at least one; empty at the end of the answer.

        Raises:
            Broken: the connection ended before the answer did.
        """
        while not self._pieces:
            if self._parser.is_done:
                return b""
            await self._wait()
        pieces, self._pieces = self._pieces, []
        self._num_buffered = 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    @property
    def is_at_end(self) -> bool:
        """Whether everything of the answer has been read."""
        return self._parser.is_done and not self._pieces

    def drop(self) -> None:
        """Close at once, whatever is under way; the engine takes that as the request's end."""
        if self._transport is not None:
            self._transport.abort()

    def rest(self) -> None:
        """The exchange is over; until the next one anything that arrives ends the connection."""
        self._is_idle = True

    async def _wait(self) -> None:
        if self._error is not None:
            raise Broken(str(self._error)) from self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: connected."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes arrived."""
        if self._is_idle:
            self.drop()
            return
        try:
            pieces = self._parser.feed(data)
        except Malformed as error:
            self._error = error
            self.drop()
        else:
            if pieces:
                self._pieces += pieces
                self._num_buffered += len(data)
                if self._num_buffered > _HIGH_WATER_BYTES and not self._is_paused and self._transport is not None:
                    self._is_paused = True
                    self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: over."""
        self._transport = None
        try:
            self._parser.finish()
        except Malformed as error:
            self._error = self._error or exc or error
        self._wake()

"""One connection to an engine: a request out, an answer in, again.

Owns: the protocol object, waking the one reader, pausing a sender that is faster than the reader.
Does not know: pools, engines, what is in a body.
"""

import asyncio
from collections.abc import Callable
from typing import cast

from proxy.http1.answer_parser import AnswerParser, LastHead
from proxy.http1.body_parser import Malformed

_HIGH_WATER_BYTES = 256 << 10

Push = Callable[[bytes, bool], bool]
"""Takes body bytes and whether they are the last (then they may be none); says whether it takes more at once."""


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
        self._last_head = LastHead()
        self._parser = AnswerParser(self._last_head)
        self._pieces: list[bytes] = []
        self._num_buffered = 0
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._is_paused = False
        self._is_idle = True
        self._push: Push | None = None
        self._push_error: Exception | None = None
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
        self._parser = AnswerParser(self._last_head)
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
        return _joined(self._take())

    async def pump(self, push: Push) -> None:
        """Give body bytes to `push` in the moment they arrive, until their end or until it takes no more.

        Raises:
            Broken: the connection ended before the answer did.
            Exception: whatever `push` raised.
        """
        self._push = push
        try:
            if self._pieces or self._parser.is_done:
                self._deliver(self._take())
            while self._push is not None:
                await self._wait()
        finally:
            self._push = None
        if self._push_error is not None:
            raise self._push_error

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

    def _take(self) -> list[bytes]:
        """What has been kept for the reader, who is no longer behind."""
        pieces, self._pieces = self._pieces, []
        self._num_buffered = 0
        if self._is_paused and not self.is_closed and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return pieces

    def _deliver(self, pieces: list[bytes]) -> None:
        is_last = self._parser.is_done
        if self._push is None or not (pieces or is_last):
            return
        try:
            takes_more = self._push(_joined(pieces), is_last)
        except Exception as error:  # noqa: BLE001 - belongs to whoever pumps, not to the event loop
            self._push_error, takes_more = error, False
        if is_last or not takes_more:
            self._push = None
            self._wake()

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
            if self._push is not None:
                self._deliver(pieces)
                return
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
        else:
            self._deliver([])
        self._wake()


def _joined(pieces: list[bytes]) -> bytes:
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)

"""One connection of a client: requests in, one after the other, answers out.

Owns: where a request begins and ends in the bytes, the order of requests, disconnects, and how a connection ends.
Does not know: what is asked; which connections there are.
"""

import asyncio
from typing import Protocol, cast

from common.openai.error_body import CONTENT_TYPE, error_body
from proxy.http1.body_parser import BodyParser, Malformed, Part
from proxy.http1.exchange import Exchange, Reply
from proxy.http1.request_head import MAX_HEAD_BYTES, HeadReader, RequestHead

_MAX_AHEAD_BYTES = 64 << 10
_LINGER_S = 10.0
"""How long a body that nobody wants may go on: closing over unread bytes would take the answer away from the client."""
_UNREADABLE = RequestHead("GET", "", {}, 0, is_chunked=False, is_http10=False, keeps_alive=False)


class Host(Protocol):
    """The server that a connection belongs to."""

    heads: HeadReader
    max_body_bytes: int
    is_stopping: bool

    def date_line(self) -> str:
        """`Date: …` and the end of the line."""
        ...

    def serve(self, exchange: Exchange, connection: "ClientConnection") -> asyncio.Task[None]:
        """Have `exchange` answered; calls `finished` at its end."""
        ...

    def joined(self, connection: "ClientConnection") -> None:
        """It is open."""
        ...

    def left(self, connection: "ClientConnection") -> None:
        """It is gone."""
        ...


class ClientConnection(asyncio.Protocol):
    """asyncio's protocol of one connection, and the `Wire` of its exchanges.

    Args:
        host: the server.
        loop: the running loop.
    """

    __slots__ = (
        *("_body", "_buffer", "_draining", "_exchange", "_host", "_is_deaf", "_is_held", "_is_leaving", "_linger"),
        *("_loop", "_rest", "_since_s", "_task", "_transport", "is_paused", "max_body_bytes"),
    )

    def __init__(self, host: Host, loop: asyncio.AbstractEventLoop) -> None:
        self._host = host
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._exchange: Exchange | None = None
        self._task: asyncio.Task[None] | None = None
        self._body: BodyParser | None = None
        self._rest = b""
        self._is_deaf = False
        self._is_held = False
        self._is_leaving = False
        self._linger: asyncio.TimerHandle | None = None
        self._draining: list[asyncio.Future[None]] = []
        self._since_s = loop.time()
        self.is_paused = False
        self.max_body_bytes = host.max_body_bytes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: connected."""
        self._transport = cast("asyncio.Transport", transport)
        self._host.joined(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """asyncio: over; whoever works for this client may stop."""
        self._transport = None
        self._host.left(self)
        if self._linger is not None:
            self._linger.cancel()
        if self._task is not None and self._exchange is not None and not self._exchange.is_ended:
            self._task.cancel()
        self.resume_writing()

    def pause_writing(self) -> None:
        """asyncio: the client is slow."""
        self.is_paused = True

    def resume_writing(self) -> None:
        """asyncio: it has caught up."""
        self.is_paused = False
        waiting, self._draining = self._draining, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes arrived."""
        if self._is_deaf:
            return
        if self._body is not None:
            data = self._take_body(self._body, data)
            if not data:
                return
        if self._buffer:
            self._buffer += data
        else:
            self._buffer, self._since_s = data, self._loop.time()
        if self._exchange is None:
            self._next()
        elif len(self._buffer) > _MAX_AHEAD_BYTES and self._transport is not None and not self._is_held:
            self._is_held = True
            self._transport.pause_reading()

    def _take_body(self, body: BodyParser, data: bytes) -> bytes:
        """Feed the body under way; whatever stands behind it."""
        buffer = self._rest + data if self._rest else data
        pieces: list[bytes] = []
        try:
            at = body.feed(buffer, 0, pieces)
        except Malformed as error:
            self._is_deaf = True
            if self._exchange is not None:
                self._exchange.fail(error)
            return b""
        if self._exchange is not None:
            self._exchange.take(pieces)
        if not body.is_done:
            self._rest = buffer[at:]
            return b""
        self._body, self._rest = None, b""
        if self._exchange is not None:
            self._exchange.complete()
        elif self._linger is not None:
            self._linger.cancel()
            self._linger, self._since_s = None, self._loop.time()
        return buffer[at:]

    def _next(self) -> None:
        """Begin with the next request, if its head is here."""
        buffer = self._buffer
        if buffer[:1] in (b"\r", b"\n"):
            buffer = self._buffer = buffer.lstrip(b"\r\n")  # some clients send a line break too much
        end = buffer.find(b"\r\n\r\n")
        if end < 0 or end > MAX_HEAD_BYTES:
            if len(buffer) > MAX_HEAD_BYTES:
                self._refuse("the head of the request is too long", 431)
            return
        try:
            head = self._host.heads.read(buffer[:end])
        except Malformed as error:
            self._refuse(f"this is not HTTP/1.1: {error}", 400)
            return
        exchange = Exchange(head, self)
        at = end + 4
        if head.num_bytes and not head.is_chunked and len(buffer) - at >= head.num_bytes:
            exchange.take([buffer[at : at + head.num_bytes]])
            exchange.complete()
            self._buffer = buffer[at + head.num_bytes :]
        else:
            self._buffer = b""
            self._exchange = exchange
            self._body = BodyParser(Part.CHUNK_SIZE if head.is_chunked else Part.LENGTH, head.num_bytes)
            self._buffer = self._take_body(self._body, buffer[at:])
        self._exchange = exchange
        self._task = self._host.serve(exchange, self)

    def finished(self) -> None:
        """For the server: whoever answered has ended."""
        exchange, self._exchange, self._task = self._exchange, None, None
        if self._transport is None or exchange is None:
            return
        if not exchange.is_ended:
            self._transport.close()
        elif not exchange.keeps_alive:
            self._leave()
        elif self._body is not None:
            self._linger = self._loop.call_later(_LINGER_S, self.abort)
        else:
            self._since_s = self._loop.time()
            if self._buffer:
                self._next()
            if self._is_held and len(self._buffer) <= _MAX_AHEAD_BYTES and not self._transport.is_closing():
                self._is_held = False
                self._transport.resume_reading()

    def _refuse(self, message: str, status: int) -> None:
        """Answer what cannot be read as a request, and leave."""
        body = error_body(message, type_="invalid_request_error", code="malformed_request")
        Exchange(_UNREADABLE, self).send(Reply(body, status, {"Content-Type": CONTENT_TYPE}))
        self._is_deaf = True
        self._leave()

    def _leave(self) -> None:
        """Close; over a request that is still arriving, only after the client has had time to read the answer."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._body is None and not self._is_deaf:
            self._transport.close()
            return
        self._is_deaf = True
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._linger = self._loop.call_later(_LINGER_S, self.abort)

    # The wire of the exchanges.

    def date_line(self) -> str:
        """`Date: …` and the end of the line."""
        return self._host.date_line()

    def may_be_kept(self) -> bool:
        """Whether another request may follow; not over a body that cannot be skipped."""
        if self._is_leaving or self._is_deaf or self._host.is_stopping:
            return False
        exchange = self._exchange
        # Told the end before it was told to go on, the client may or may not send its body.
        return not (self._body is not None and exchange is not None and exchange.awaits_permission)

    def write(self, *parts: bytes) -> None:
        """Send.

        Raises:
            ConnectionResetError: the client is gone.
        """
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the client is gone")
        if len(parts) == 1:
            self._transport.write(parts[0])
        else:
            self._transport.writelines(parts)

    async def drain(self) -> None:
        """Return when the client has taken enough.

        Raises:
            ConnectionResetError: the client is gone.
        """
        if self.is_paused:
            waiter = self._loop.create_future()
            self._draining.append(waiter)
            await waiter
        if self._transport is None:
            raise ConnectionResetError("the client is gone")

    def abort(self) -> None:
        """Drop the connection."""
        if self._transport is not None:
            self._transport.abort()

    # The server's business.

    def close(self) -> None:
        """Close now, or as soon as the request under way has been answered."""
        self._is_leaving = True
        if self._exchange is None and self._transport is not None:
            self._transport.close()
        elif self._exchange is not None:
            self._exchange.keeps_alive = False

    def close_if_older(self, request_before_s: float, idle_before_s: float) -> None:
        """Close where a request has been arriving, or nothing has happened, since before these instants."""
        is_waiting = self._exchange is None and self._body is None and self._linger is None
        if is_waiting and self._since_s < (request_before_s if self._buffer else idle_before_s):
            self.close()

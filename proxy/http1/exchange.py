"""One request of a client and the answer to it, as handlers see them.

Owns: the body as it arrives, the bytes of an answer: head, chunks, end. Does not know: sockets, other requests of the
same connection, what is asked.
"""

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from typing import Protocol

import msgspec

from proxy.http1.request_head import RequestHead

_NO_LENGTH = frozenset({204, 304})
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}
_COPIED_BYTES = 64 << 10
"""Up to here, head and body are joined to leave in one piece."""


class BodyTooLarge(Exception):
    """More bytes than the server takes, announced or counted."""


class Reply(msgspec.Struct):
    """A complete answer."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = {}


class Wire(Protocol):
    """The connection underneath."""

    max_body_bytes: int
    is_paused: bool

    def date_line(self) -> str:
        """`Date: …` and the end of the line."""
        ...

    def may_be_kept(self) -> bool:
        """Whether the connection can serve another request after this one."""
        ...

    def write(self, *parts: bytes) -> None:
        """Send; raises ConnectionResetError once the client is gone."""
        ...

    async def drain(self) -> None:
        """Return when the client has taken enough of what was written."""
        ...

    def abort(self) -> None:
        """Drop the connection with whatever has not left yet."""
        ...

    def close(self) -> None:
        """Close the connection once nothing is under way."""
        ...


class Exchange:
    """A request and its answer: `send`, or `begin`, any number of `write`, and `end`.

    Args:
        head: the request's.
        wire: where it came from.

    Attributes:
        is_begun: whether an answer is under way or out.
        is_ended: whether all of it was written.
        keeps_alive: whether the connection stays open after this; settled when the answer's head is written.
        is_whole: whether all of the body is here.
    """

    __slots__ = (
        *("_failure", "_held", "_is_chunked", "_num_bytes", "_pieces", "_waiter"),
        *("head", "is_begun", "is_ended", "is_whole", "keeps_alive", "wire"),
    )

    def __init__(self, head: RequestHead, wire: Wire) -> None:
        self.head = head
        self.wire = wire
        self.is_begun = False
        self.is_ended = False
        self.is_whole = False
        self.keeps_alive = head.keeps_alive
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._failure: Exception | None = BodyTooLarge() if head.num_bytes > wire.max_body_bytes else None
        self._waiter: asyncio.Future[None] | None = None
        self._held = b""
        self._is_chunked = False

    async def read(self) -> bytes:
        """The body as sent.

        Raises:
            BodyTooLarge: it is.
            Malformed: it does not hold what it announced.
        """
        if not self.is_whole and self._failure is None:
            if not self._pieces and self.awaits_permission:
                self.wire.write(_CONTINUE)
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._failure is not None:
            raise self._failure
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)

    @property
    def awaits_permission(self) -> bool:
        """Whether the client holds its body back until it is told to go on."""
        expects = self.head.headers.get("expect")
        return expects is not None and expects.lower() == "100-continue" and not self.head.is_http10

    @property
    def has_arrived(self) -> bool:
        """Whether anything of the body has."""
        return self._num_bytes > 0

    def take(self, pieces: list[bytes]) -> None:
        """For the connection: more of the body; what nobody will read any more is dropped."""
        self._num_bytes += sum(map(len, pieces))
        if self._num_bytes > self.wire.max_body_bytes:
            self.fail(BodyTooLarge())
        if self._failure is None and not self.is_ended:
            self._pieces += pieces

    def complete(self) -> None:
        """For the connection: that was the whole body."""
        self.is_whole = True
        self._wake()

    def fail(self, failure: Exception) -> None:
        """For the connection: the body cannot be read."""
        self._failure = self._failure or failure
        self._pieces = []
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def send(self, reply: Reply) -> None:
        """Answer in one piece.

        Raises:
            ConnectionResetError: the client is gone.
        """
        framing = "" if reply.status in _NO_LENGTH else f"Content-Length: {len(reply.body)}\r\n"
        head = self._head(reply.status, reply.headers, framing)
        body = b"" if self.head.method == "HEAD" or not framing else reply.body
        self.is_ended = True
        if len(body) <= _COPIED_BYTES:
            self.wire.write(head + body)
        else:
            self.wire.write(head, body)

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """The head of an answer whose length is not known yet; leaves with the first bytes of the body."""
        self._is_chunked = not self.head.is_http10
        if not self._is_chunked:
            self.keeps_alive = False
        self._held = self._head(status, headers, "Transfer-Encoding: chunked\r\n" if self._is_chunked else "")

    def write(self, data: bytes) -> None:
        """More of the body; look at `is_paused` afterwards.

        Raises:
            ConnectionResetError: the client is gone.
        """
        if data:
            framed = b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data
            if self._held:
                framed, self._held = self._held + framed, b""
            self.wire.write(framed)

    def end(self, last: bytes = b"") -> None:
        """The rest of the body, and its end, in one piece.

        Raises:
            ConnectionResetError: the client is gone.
        """
        self.is_ended = True
        if self._is_chunked:
            last = b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last) if last else b"0\r\n\r\n"
        self.wire.write(self._held + last)
        self._held = b""

    @property
    def is_paused(self) -> bool:
        """Whether the client takes its bytes more slowly than they come: `drain` before more is written."""
        return self.wire.is_paused

    async def drain(self) -> None:
        """Wait until the client has taken enough."""
        await self.wire.drain()

    def _head(self, status: int, headers: Mapping[str, str], framing: str) -> bytes:
        self.is_begun = True
        self.keeps_alive = self.keeps_alive and self.wire.may_be_kept()
        if not self.keeps_alive:
            connection = "Connection: close\r\n"
        else:
            connection = "Connection: keep-alive\r\n" if self.head.is_http10 else ""
        line = _STATUS_LINES.get(status) or f"HTTP/1.1 {status} \r\n"
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
            raise ValueError("a header with a line break in it")
        return f"{line}{lines}{self.wire.date_line()}{framing}{connection}\r\n".encode("utf-8", "surrogateescape")

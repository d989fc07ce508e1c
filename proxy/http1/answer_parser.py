"""One HTTP/1.1 answer out of bytes that arrive in pieces (RFC 9112).

Owns: status line, headers, which of the ways of ending the body has. Does not know: sockets.
"""

from proxy.http1.body_parser import BodyParser, Malformed, Part

MAX_HEAD_BYTES = 64 << 10
_NO_BODY = (204, 304)


class LastHead:
    """The last head of a connection: an engine's answers often begin with the same bytes, second for second."""

    __slots__ = ("headers", "keeps_alive", "raw", "status")

    def __init__(self) -> None:
        self.raw = b""
        self.status = 0
        self.headers: dict[str, str] = {}
        self.keeps_alive = True


class AnswerParser:
    """Feed it; look at `status` and `headers` once `has_head`; take body pieces from what `feed` returns.

    Args:
        last: the head that the connection's previous answer had.
    """

    __slots__ = ("_body", "_buffer", "_last", "headers", "is_done", "keeps_alive", "status")

    def __init__(self, last: LastHead | None = None) -> None:
        self._last = last or LastHead()
        self.status = 0
        self.headers: dict[str, str] = {}
        self.keeps_alive = True
        self.is_done = False
        """Whether the body has been read to its end."""
        self._body: BodyParser | None = None
        self._buffer = b""

    @property
    def has_head(self) -> bool:
        """Whether the final (not 1xx) head has been read."""
        return self._body is not None

    def feed(self, data: bytes) -> list[bytes]:
        """Body pieces that `data` holds, framing removed; bytes after the end make the connection unfit for reuse.

        Raises:
            Malformed: no HTTP/1.1 answer.
        """
        buffer = self._buffer + data if self._buffer else data
        pieces: list[bytes] = []
        at = 0
        body = self._body
        if body is None:
            at = self._head(buffer)
            body = self._body
        if body is not None:
            at = body.feed(buffer, at, pieces)
            if body.is_done:
                self.is_done = True
                if at < len(buffer):
                    self.keeps_alive = False  # nobody asked for what follows
                    at = len(buffer)
        self._buffer = buffer[at:] if at else buffer
        return pieces

    def finish(self) -> None:
        """The connection ended.

        Raises:
            Malformed: in the middle of the answer.
        """
        if self._body is None:
            raise Malformed("the connection ended in the middle of an answer")
        self._body.finish()
        self.is_done = True

    def _head(self, buffer: bytes) -> int:
        """Read heads until a final one; the position after it, or after the last 1xx while it is incomplete."""
        start = 0
        while True:
            end = buffer.find(b"\r\n\r\n", start)
            if end < 0:
                if len(buffer) - start > MAX_HEAD_BYTES:
                    raise Malformed("the head is too long")
                return start
            self._read_head(buffer[start:end])
            start = end + 4
            if self.status >= 200:
                self._body = self._choose_body()
                return start

    def _read_head(self, head: bytes) -> None:
        last = self._last
        if head != last.raw:
            self._parse_head(head)
            last.raw, last.status, last.headers, last.keeps_alive = head, self.status, self.headers, self.keeps_alive
        else:
            self.status, self.headers, self.keeps_alive = last.status, last.headers, last.keeps_alive

    def _parse_head(self, head: bytes) -> None:
        status_line, *lines = head.decode("utf-8", "surrogateescape").split("\r\n")
        version, _, rest = status_line.partition(" ")
        if version not in ("HTTP/1.1", "HTTP/1.0") or not rest[:3].isdigit():
            raise Malformed(f"not a status line: {status_line[:40]!r}")
        self.status = int(rest[:3])
        self.headers = headers = {}
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon:
                raise Malformed("a header line without a colon")
            headers[name.lower()] = value.strip(" \t")
        connection = headers.get("connection", "").lower()
        self.keeps_alive = "close" not in connection and (version == "HTTP/1.1" or "keep-alive" in connection)

    def _choose_body(self) -> BodyParser:
        if self.status in _NO_BODY:
            return BodyParser(Part.LENGTH)
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            return BodyParser(Part.CHUNK_SIZE)
        if (length := self.headers.get("content-length")) is not None:
            if not length.isascii() or not length.isdigit():
                raise Malformed(f"not a length: {length[:40]!r}")
            return BodyParser(Part.LENGTH, int(length))
        self.keeps_alive = False
        return BodyParser(Part.UNTIL_CLOSE)

"""One HTTP/1.1 answer out of bytes that arrive in pieces (RFC 9112).

Owns: status line, headers, the three ways a body can end. Does not know: sockets.
"""

from enum import Enum

MAX_HEAD_BYTES = 64 << 10
_MAX_CHUNK_LINE_BYTES = 4096
_NO_BODY = (204, 304)


class Malformed(Exception):
    """The bytes are no HTTP/1.1 answer."""


class _Part(Enum):
    HEAD = "head"
    LENGTH = "length"
    CHUNK_SIZE = "chunk_size"
    CHUNK_DATA = "chunk_data"
    CHUNK_END = "chunk_end"
    TRAILER = "trailer"
    UNTIL_CLOSE = "until_close"
    DONE = "done"


class AnswerParser:
    """Feed it; look at `status` and `headers` once `has_head`; take body pieces from what `feed` returns."""

    __slots__ = ("_buffer", "_left", "_part", "headers", "keeps_alive", "status")

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.keeps_alive = True
        self._part = _Part.HEAD
        self._buffer = b""
        self._left = 0

    @property
    def has_head(self) -> bool:
        """Whether the final (not 1xx) head has been read."""
        return self._part is not _Part.HEAD

    @property
    def is_done(self) -> bool:
        """Whether the body has been read to its end."""
        return self._part is _Part.DONE

    def feed(self, data: bytes) -> list[bytes]:
        """Body pieces that `data` holds, framing removed; bytes after the end make the connection unfit for reuse.

        Raises:
            Malformed: no HTTP/1.1 answer.
        """
        buffer = self._buffer + data if self._buffer else data
        pieces: list[bytes] = []
        at = 0
        if self._part is _Part.HEAD:
            at = self._head(buffer)
        while at < len(buffer):
            if self._part is _Part.CHUNK_SIZE:
                at = _whole_chunks(buffer, at, pieces)
            moved = self._step(buffer, at, pieces)
            if moved == at:
                break
            at = moved
        self._buffer = buffer[at:] if at else buffer
        return pieces

    def finish(self) -> None:
        """The connection ended.

        Raises:
            Malformed: in the middle of the answer.
        """
        if self._part is _Part.UNTIL_CLOSE:
            self._part = _Part.DONE
        if self._part is not _Part.DONE:
            raise Malformed("the connection ended in the middle of an answer")

    def _head(self, buffer: bytes) -> int:
        """Read heads until a final one; the position after it, or 0 while it is incomplete."""
        start = 0
        while True:
            end = buffer.find(b"\r\n\r\n", start)
            if end < 0:
                if len(buffer) - start > MAX_HEAD_BYTES:
                    raise Malformed("the head is too long")
                return start
            self._parse_head(buffer[start:end])
            start = end + 4
            if self.status >= 200:
                self._choose_body()
                return start

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

    def _choose_body(self) -> None:
        if self.status in _NO_BODY:
            self._part = _Part.DONE
        elif "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._part = _Part.CHUNK_SIZE
        elif (length := self.headers.get("content-length")) is not None:
            if not length.isdigit():
                raise Malformed(f"not a length: {length[:40]!r}")
            self._left = int(length)
            self._part = _Part.LENGTH if self._left else _Part.DONE
        else:
            self._part = _Part.UNTIL_CLOSE
            self.keeps_alive = False

    def _step(self, buffer: bytes, at: int, pieces: list[bytes]) -> int:
        """Read one element at `at`; the position after it, or `at` when more bytes are needed."""
        part = self._part
        if part is _Part.CHUNK_SIZE:
            return self._chunk_size(buffer, at)
        if part is _Part.CHUNK_DATA or part is _Part.LENGTH:
            return self._data(buffer, at, pieces)
        if part is _Part.CHUNK_END:
            return self._chunk_end(buffer, at)
        if part is _Part.TRAILER:
            return self._trailer(buffer, at)
        if part is _Part.UNTIL_CLOSE:
            pieces.append(buffer[at:])
            return len(buffer)
        if part is _Part.DONE:
            self.keeps_alive = False  # nobody asked for what follows
            return len(buffer)
        return at  # HEAD: not all here yet

    def _data(self, buffer: bytes, at: int, pieces: list[bytes]) -> int:
        piece = buffer[at : at + self._left]
        pieces.append(piece)
        self._left -= len(piece)
        if self._left == 0:
            self._part = _Part.DONE if self._part is _Part.LENGTH else _Part.CHUNK_END
        return at + len(piece)

    def _chunk_size(self, buffer: bytes, at: int) -> int:
        end = buffer.find(b"\r\n", at)
        if end < 0:
            if len(buffer) - at > _MAX_CHUNK_LINE_BYTES:
                raise Malformed("a chunk size line is too long")
            return at
        size = buffer[at:end].split(b";", 1)[0].strip()
        try:
            self._left = int(size, 16)
        except ValueError:
            raise Malformed(f"not a chunk size: {size[:40]!r}") from None
        if self._left < 0:
            raise Malformed("a negative chunk size")
        self._part = _Part.CHUNK_DATA if self._left else _Part.TRAILER
        return end + 2

    def _chunk_end(self, buffer: bytes, at: int) -> int:
        if len(buffer) - at < 2:
            return at
        if buffer[at : at + 2] != b"\r\n":
            raise Malformed("a chunk does not end where it says")
        self._part = _Part.CHUNK_SIZE
        return at + 2

    def _trailer(self, buffer: bytes, at: int) -> int:
        end = buffer.find(b"\r\n", at)
        if end < 0:
            if len(buffer) - at > MAX_HEAD_BYTES:
                raise Malformed("the trailer is too long")
            return at
        if end == at:
            self._part = _Part.DONE
        return end + 2


def _whole_chunks(buffer: bytes, at: int, pieces: list[bytes]) -> int:
    """The common case in one go: plain chunks that lie in `buffer` completely; the position after the last of them."""
    while True:
        data = buffer.find(b"\r\n", at) + 2
        try:
            end = data + int(buffer[at : data - 2], 16)
        except ValueError:
            return at
        if data < 2 or end <= data or buffer[end : end + 2] != b"\r\n":
            return at
        pieces.append(buffer[data:end])
        at = end + 2

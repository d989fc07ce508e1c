"""The body of one HTTP/1.1 message out of bytes that arrive in pieces (RFC 9112, sections 6 and 7).

Owns: the three ways a body can end. Does not know: heads, sockets, in which direction the message goes.
"""

from enum import Enum
from functools import lru_cache

MAX_TRAILER_BYTES = 64 << 10
_MAX_CHUNK_LINE_BYTES = 4096
_MAX_DIGITS = 8
_HEX = b"0123456789abcdefABCDEF"


class Malformed(Exception):
    """The bytes are no HTTP/1.1 message."""


class Part(Enum):
    """What comes next."""

    LENGTH = "length"
    CHUNK_SIZE = "chunk_size"
    CHUNK_DATA = "chunk_data"
    CHUNK_END = "chunk_end"
    TRAILER = "trailer"
    UNTIL_CLOSE = "until_close"
    DONE = "done"


class BodyParser:
    """Feed it; framing is taken off. Whoever feeds keeps what was not used yet.

    Args:
        part: LENGTH, CHUNK_SIZE or UNTIL_CLOSE.
        num_bytes: how long a body of known length is.
    """

    __slots__ = ("_left", "part")

    def __init__(self, part: Part, num_bytes: int = 0) -> None:
        self._left = num_bytes
        self.part = Part.DONE if part is Part.LENGTH and num_bytes == 0 else part

    @property
    def is_done(self) -> bool:
        """Whether the body has been read to its end."""
        return self.part is Part.DONE

    def feed(self, buffer: bytes, at: int, pieces: list[bytes]) -> int:
        """Read from `at` on and add to `pieces`; the position up to which `buffer` is used up.

        Raises:
            Malformed: no body as it was announced.
        """
        may_be_plain = True  # asked once: looking for line breaks again behind every chunk would add up
        while at < len(buffer) and self.part is not Part.DONE:
            if may_be_plain and self.part is Part.CHUNK_SIZE:
                at, may_be_plain = _whole_chunks(buffer, at, pieces), False
                continue
            moved = self._step(buffer, at, pieces)
            if moved == at:
                break
            at = moved
        return at

    def finish(self) -> None:
        """The connection ended.

        Raises:
            Malformed: in the middle of the body.
        """
        if self.part is Part.UNTIL_CLOSE:
            self.part = Part.DONE
        if self.part is not Part.DONE:
            raise Malformed("the connection ended in the middle of a body")

    def _step(self, buffer: bytes, at: int, pieces: list[bytes]) -> int:
        """Read one element at `at`; the position after it, or `at` when more bytes are needed."""
        part = self.part
        if part is Part.CHUNK_SIZE:
            return self._chunk_size(buffer, at)
        if part is Part.CHUNK_DATA or part is Part.LENGTH:
            return self._data(buffer, at, pieces)
        if part is Part.CHUNK_END:
            return self._chunk_end(buffer, at)
        if part is Part.TRAILER:
            return self._trailer(buffer, at)
        pieces.append(buffer[at:])
        return len(buffer)

    def _data(self, buffer: bytes, at: int, pieces: list[bytes]) -> int:
        piece = buffer[at : at + self._left]
        pieces.append(piece)
        self._left -= len(piece)
        if self._left == 0:
            self.part = Part.DONE if self.part is Part.LENGTH else Part.CHUNK_END
        return at + len(piece)

    def _chunk_size(self, buffer: bytes, at: int) -> int:
        end = buffer.find(b"\r\n", at)
        if end < 0:
            if len(buffer) - at > _MAX_CHUNK_LINE_BYTES:
                raise Malformed("a chunk size line is too long")
            return at
        line = buffer[at:end]
        size = line.split(b";", 1)[0].strip(b" \t")
        if not size or size.translate(None, _HEX) or b"\n" in line or b"\r" in line:
            raise Malformed(f"not a chunk size: {size[:40]!r}")
        self._left = int(size, 16)
        self.part = Part.CHUNK_DATA if self._left else Part.TRAILER
        return end + 2

    def _chunk_end(self, buffer: bytes, at: int) -> int:
        if len(buffer) - at < 2:
            return at
        if buffer[at : at + 2] != b"\r\n":
            raise Malformed("a chunk does not end where it says")
        self.part = Part.CHUNK_SIZE
        return at + 2

    def _trailer(self, buffer: bytes, at: int) -> int:
        end = buffer.find(b"\r\n", at)
        if end < 0:
            if len(buffer) - at > MAX_TRAILER_BYTES:
                raise Malformed("the trailer is too long")
            return at
        if end == at:
            self.part = Part.DONE
        return end + 2


def _whole_chunks(buffer: bytes, at: int, pieces: list[bytes]) -> int:
    """The common case in one go: plain chunks without a line break inside; the position after the last of them."""
    parts = (buffer[at:] if at else buffer).split(b"\r\n")
    # What stands behind the last line break is no whole chunk yet.
    for digits, piece in zip(parts[0:-1:2], parts[1:-1:2], strict=False):
        if len(piece) != _size_of(digits):
            return at
        pieces.append(piece)
        at += len(digits) + len(piece) + 4
    return at


@lru_cache(maxsize=4096)
def _size_of(digits: bytes) -> int | None:
    """What a plain size line says; None for the last chunk's and for lines that must be looked at more closely."""
    if not digits or len(digits) > _MAX_DIGITS or digits.translate(None, _HEX):
        return None
    return int(digits, 16) or None

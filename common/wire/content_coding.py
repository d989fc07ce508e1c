"""Bodies that a client sent compressed: gzip, of any number of members, and deflate.

Owns: undoing `Content-Encoding` within a limit on what comes out. Does not know: HTTP messages.
"""

import zlib

from common.errors import InvalidRequest, PayloadTooLarge

_GZIP, _ZLIB, _RAW = zlib.MAX_WBITS | 16, zlib.MAX_WBITS, -zlib.MAX_WBITS
_ZLIB_METHOD = 8
_MAX_MEMBERS = 10_000
"""More than a body within its limit has in practice (block-wise gzip makes one per 64 KiB); empty ones cost, too."""
_FIRST_BYTES, _MOST_BYTES = 256, 1 << 20
"""What a stream is fed with at a time: each returns what lies behind its end, which is copied."""


def decoded(body: bytes, encoding: str, most_bytes: int) -> bytes:
    """The body as it was before `encoding`. Blocks for as long as it takes: a small body may hold a large one.

    Args:
        body: as received.
        encoding: the header's value, in any case; empty or `identity` leaves the body as it is.
        most_bytes: limit on the result, all members taken together.

    Raises:
        InvalidRequest: another encoding, a body cut off, damaged, or with something behind its end.
        PayloadTooLarge: the result has more than `most_bytes`.
    """
    match encoding.lower():
        case "" | "identity":
            return body
        case "gzip" | "x-gzip":
            return _inflated(body, _GZIP, most_bytes, _MAX_MEMBERS)
        case "deflate":
            # Half of the world sends it without the wrapper that its specification asks for.
            window = _ZLIB if body[:1] and body[0] & 15 == _ZLIB_METHOD else _RAW
            return _inflated(body, window, most_bytes, 1)
        case _:
            raise InvalidRequest("Content-Encoding may be gzip or deflate")


def _inflated(body: bytes, window: int, most_bytes: int, most_members: int) -> bytes:
    members: list[bytes] = []
    left_bytes, rest = most_bytes, memoryview(body)
    try:
        for _ in range(most_members):
            member, rest = _first_member(rest, window, left_bytes)
            members.append(member)
            left_bytes -= len(member)
            if not rest:
                return b"".join(members)
    except zlib.error as error:
        raise InvalidRequest(f"the body is not encoded as declared: {error}") from error
    except _TooMuch as error:
        raise PayloadTooLarge(f"the body may have at most {most_bytes} bytes, decompressed") from error
    raise InvalidRequest("the body goes on behind the end of what is encoded in it")


def _first_member(body: memoryview, window: int, most_bytes: int) -> tuple[bytes, memoryview]:
    """The first stream of `body`, inflated, and what lies behind it. Raises zlib.error, InvalidRequest, _TooMuch."""
    reader = zlib.decompressobj(wbits=window)
    pieces: list[bytes] = []
    num_fed, fed_bytes, left_bytes = 0, _FIRST_BYTES, most_bytes + 1
    while not reader.eof:
        if num_fed == len(body):
            raise InvalidRequest("the body is cut off: its encoding has no end")
        fed = body[num_fed : num_fed + fed_bytes]
        pieces.append(reader.decompress(fed, left_bytes))
        left_bytes -= len(pieces[-1])
        if left_bytes == 0:
            raise _TooMuch
        num_fed += len(fed)
        fed_bytes = min(2 * fed_bytes, _MOST_BYTES)
    return b"".join(pieces), body[num_fed - len(reader.unused_data) :]


class _TooMuch(Exception):
    """A member inflates to more than it may."""

"""One HTTP request of a client, and what every handler needs to know of it.

Owns: reading bodies within limits, the request id. Does not know: routes, journeys.
"""

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from common.errors import InvalidRequest, PayloadTooLarge
from proxy.config import ProxyConfig
from proxy.http1.body_parser import Malformed
from proxy.http1.exchange import BodyTooLarge, Exchange, Reply

REQUEST_ID = "X-Request-Id"
REQUEST_ID_KEY = REQUEST_ID.lower()
JSON = "application/json"
_GZIP, _ZLIB, _RAW = zlib.MAX_WBITS | 16, zlib.MAX_WBITS, -zlib.MAX_WBITS
_ZLIB_METHOD = 8


class Incoming(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was let in.

    Attributes:
        http: the request as the server gives it.
        owner: name of the key it came with; None where none is needed.
        request_id: the client's label, or one made here.
        answer_headers: what the answer must carry whatever it says (CORS).
    """

    http: Exchange
    owner: str | None
    request_id: str
    answer_headers: Mapping[str, str]


Handler = Callable[[Incoming], Awaitable[Reply | None]]
"""Answers a request: by what it returns, or by itself (None)."""


async def read_body(http: Exchange, config: ProxyConfig) -> bytes:
    """The whole body, decompressed.

    Raises:
        PayloadTooLarge: more than `max_body_bytes`, as declared or as counted.
        InvalidRequest: cut off, not encoded as declared, or too slow.
    """
    try:
        if http.is_whole:
            # A small body has come with the head: there is nothing to wait for.
            body = await http.read()
        else:
            async with asyncio.timeout(config.timeouts.body_s):
                body = await http.read()
        encoding = http.head.headers.get("content-encoding")
        if encoding is None:
            return body
        return await asyncio.to_thread(_decoded, body, encoding.lower(), config.max_body_bytes)
    except BodyTooLarge as error:
        raise PayloadTooLarge(f"the body may have at most {config.max_body_bytes} bytes") from error
    except (Malformed, zlib.error) as error:
        raise InvalidRequest("the body could not be read: it is cut off or not encoded as declared") from error
    except TimeoutError as error:
        raise InvalidRequest("the body did not arrive in time") from error


def _decoded(body: bytes, encoding: str, most_bytes: int) -> bytes:
    """Blocks for as long as it takes: a small body may hold a large one."""
    if encoding in ("", "identity"):
        return body
    if encoding in ("gzip", "x-gzip"):
        window = _GZIP
    elif encoding == "deflate":
        # Half of the world sends it without the wrapper that its specification asks for.
        window = _ZLIB if body[:1] and body[0] & 15 == _ZLIB_METHOD else _RAW
    else:
        raise InvalidRequest("Content-Encoding may be gzip or deflate")
    reader = zlib.decompressobj(wbits=window)
    decoded = reader.decompress(body, most_bytes + 1)
    if len(decoded) > most_bytes:
        raise BodyTooLarge
    if not reader.eof or reader.unused_data:
        raise Malformed("not one whole stream")
    return decoded


def json_response(body: bytes, status: int = 200) -> Reply:
    """A JSON answer from bytes."""
    return Reply(body, status, {"Content-Type": JSON})

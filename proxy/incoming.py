"""One HTTP request of a client, and what every handler needs to know of it.

Owns: reading bodies within limits, the request id. Does not know: routes, journeys.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from common.errors import InvalidRequest, PayloadTooLarge
from common.wire.content_coding import decoded
from proxy.config import ProxyConfig
from proxy.http1.body_parser import Malformed
from proxy.http1.exchange import BodyTooLarge, Exchange, Reply

REQUEST_ID = "X-Request-Id"
REQUEST_ID_KEY = REQUEST_ID.lower()
JSON = "application/json"


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
        return await asyncio.to_thread(decoded, body, encoding, config.max_body_bytes)
    except BodyTooLarge as error:
        raise PayloadTooLarge(f"the body may have at most {config.max_body_bytes} bytes") from error
    except Malformed as error:
        raise InvalidRequest("the body could not be read: it is cut off or framed wrongly") from error
    except TimeoutError as error:
        raise InvalidRequest("the body did not arrive in time") from error


def json_response(body: bytes, status: int = 200) -> Reply:
    """A JSON answer from bytes."""
    return Reply(body, status, {"Content-Type": JSON})

"""One HTTP request of a client, and what every handler needs to know of it.

Owns: reading bodies within limits, the request id. Does not know: routes, journeys.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError, PayloadEncodingError

from common.errors import InvalidRequest, PayloadTooLarge
from proxy.config import ProxyConfig

REQUEST_ID = "X-Request-Id"
JSON = "application/json"


class Incoming(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was let in.

    Attributes:
        http: the request as the server gives it.
        owner: name of the key it came with; None where none is needed.
        request_id: the client's label, or one made here.
        answer_headers: what the answer must carry whatever it says (CORS).
    """

    http: web.BaseRequest
    owner: str | None
    request_id: str
    answer_headers: Mapping[str, str]


Handler = Callable[[Incoming], Awaitable[web.StreamResponse]]


async def read_body(http: web.BaseRequest, config: ProxyConfig) -> bytes:
    """The whole body, decompressed.

    Raises:
        PayloadTooLarge: more than `max_body_bytes`, as declared or as counted.
        InvalidRequest: cut off, not encoded as declared, or too slow.
    """
    if (http.content_length or 0) > config.max_body_bytes:
        raise _too_large(config)
    try:
        if http.content.is_eof():
            # A small body has come with the head: there is nothing to wait for.
            body = http.content.read_nowait()
            if len(body) > config.max_body_bytes:
                raise _too_large(config)
            return body
        async with asyncio.timeout(config.timeouts.body_s):
            return await http.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise _too_large(config) from error
    except (web.RequestPayloadError, PayloadEncodingError, ContentEncodingError) as error:
        raise InvalidRequest("the body could not be read: it is cut off or not encoded as declared") from error
    except TimeoutError as error:
        raise InvalidRequest("the body did not arrive in time") from error


def _too_large(config: ProxyConfig) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body may have at most {config.max_body_bytes} bytes")


def json_response(body: bytes, status: int = 200) -> web.Response:
    """A JSON answer from bytes."""
    return web.Response(body=body, status=status, content_type=JSON)

"""Reading the body of a request: whole, within the server's limit, decompressed.

Owns: where the work is done. Does not know: what bodies say.
"""

import asyncio

from aiohttp import web

from common.wire.content_coding import decoded


async def read_body(http: web.Request) -> bytes:
    """The body as its sender meant it.

    Raises:
        InvalidRequest: it is not encoded as declared.
        PayloadTooLarge: it is, decompressed.
        web.HTTPRequestEntityTooLarge: it is, as sent.
    """
    body = await http.read()
    encoding = http.headers.get("Content-Encoding")
    if encoding is None:
        return body
    return await asyncio.to_thread(decoded, body, encoding, http.client_max_size)

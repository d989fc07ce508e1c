"""The proxy's way to its collector: its own HTTP client. Owns: the request. Does not know: what is in it."""

from urllib.parse import urlsplit

from proxy.http1.connection import Broken
from proxy.http1.pool import Origin, Pool, Unreachable

_CONNECT_S, _KEEPALIVE_S = 5.0, 30.0


class HttpCollector:
    """A `common.tracing.exporter.Collector`.

    Args:
        url: the collector's endpoint, e.g. `http://localhost:4318/v1/traces`.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._origin = Origin(parts.hostname or "", parts.port or 80)
        head = f"POST {parts.path or '/v1/traces'} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        self._head = f"{head}Content-Type: application/json\r\n".encode()
        self._pool = Pool(connect_s=_CONNECT_S, keepalive_s=_KEEPALIVE_S)

    async def post(self, body: bytes) -> int:
        """POST it; the status.

        Raises:
            OSError: no connection, or no answer.
        """
        request = b"%sContent-Length: %d\r\n\r\n%s" % (self._head, len(body), body)
        try:
            connection = await self._pool.exchange(self._origin, request)
            try:
                while await connection.read_some():
                    pass
                return connection.status
            finally:
                self._pool.give_back(self._origin, connection)
        except (Unreachable, Broken) as error:
            raise OSError(str(error)) from error

    def close(self) -> None:
        """Close the connections."""
        self._pool.close()

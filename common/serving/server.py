"""The listening socket of an engine: bound before the model loads, drained before the process ends.

Owns: aiohttp's runner and its switches. Does not know: routes.
"""

import errno
import ssl

from aiohttp import web

from common.errors import StartupError


class HttpServer:
    """Serves one application.

    Args:
        app: what to serve.
        host: address to listen on.
        port: 0 lets the system choose.
        drain_s: how long requests may finish when it closes.
        tls: None serves plain HTTP.
    """

    def __init__(
        self, app: web.Application, host: str, port: int, drain_s: float, tls: ssl.SSLContext | None = None
    ) -> None:
        self._host = host
        self._port = port
        self._tls = tls
        # handler_cancellation: a client that leaves cancels its handler, which aborts its request in the engine.
        # auto_decompress: bodies are decompressed where they are read (common.serving.bodies), as the proxy does it.
        self._runner = web.AppRunner(
            app, handler_cancellation=True, auto_decompress=False, access_log=None, shutdown_timeout=drain_s
        )

    @property
    def port(self) -> int:
        """The port in use."""
        address = self._runner.addresses[0]
        return int(address[1])

    async def start(self) -> None:
        """Bind and serve.

        Raises:
            StartupError: the address cannot be bound.
        """
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port, ssl_context=self._tls).start()
        except OSError as error:
            await self._runner.cleanup()
            where = f"{self._host}:{self._port}"
            if error.errno == errno.EADDRINUSE:
                raise StartupError(f"cannot listen on {where}: the port is taken") from error
            raise StartupError(f"cannot listen on {where}: {error.strerror or error}") from error

    async def close(self) -> None:
        """Stop listening, let requests finish for `drain_s`, cancel the rest. Idempotent."""
        await self._runner.cleanup()

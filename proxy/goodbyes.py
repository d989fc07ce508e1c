"""Connections of clients whose stream broke off: closed, but never under the client's next request.

Owns: the second between the end of a broken stream and the end of its connection. The head of that answer had promised
to keep the connection; a client that takes the promise and asks again at once is served, and the connection stays.
"""

import asyncio
from typing import Protocol

_PAUSE_S = 1.0


class Closable(Protocol):
    """A client's connection."""

    def close(self) -> None:
        """Close it."""
        ...


class Goodbyes:
    """Connections that end soon."""

    def __init__(self) -> None:
        self._timers: dict[Closable, asyncio.TimerHandle] = {}

    def say(self, connection: Closable) -> None:
        """Close `connection` in a moment, unless it is used again before."""
        self.take_back(connection)
        self._timers[connection] = asyncio.get_running_loop().call_later(_PAUSE_S, self._close, connection)

    def take_back(self, connection: Closable) -> None:
        """The connection is used again (or gone)."""
        if self._timers and (timer := self._timers.pop(connection, None)) is not None:
            timer.cancel()

    def _close(self, connection: Closable) -> None:
        self._timers.pop(connection, None)
        connection.close()

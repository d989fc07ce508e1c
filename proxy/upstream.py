"""The only HTTP client: sends legs to engines and maps whatever goes wrong to our own errors.

Owns: what a request to an engine looks like, the mapping of connection errors. Does not know: retries, deadlines.
"""

from collections.abc import Mapping
from typing import Self

import msgspec

from common.errors import UpstreamBroken, UpstreamError, UpstreamUnreachable
from proxy.fleet.worker import Worker
from proxy.http1.connection import Broken, Connection, Push
from proxy.http1.pool import Pool, Unreachable


class Answer(msgspec.Struct, frozen=True):
    """A complete answer of an engine.

    Attributes:
        status: HTTP status.
        headers: as received, names in lower case.
        body: all of it.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes


class EngineRefused(UpstreamError):
    """An engine answered with an error status; what it said goes to the client unless another engine does better."""

    def __init__(self, worker: Worker, answer: Answer) -> None:
        super().__init__(f"the {worker.role.value} engine answered {answer.status}")
        self.answer = answer


class OpenAnswer:
    """An answer whose head has arrived and whose body is still on its way; its owner must `close` it."""

    __slots__ = ("_connection", "_pool", "_worker", "headers", "status")

    def __init__(self, worker: Worker, connection: Connection, pool: Pool) -> None:
        self._worker = worker
        self._connection: Connection | None = connection
        self._pool = pool
        self.status = connection.status
        self.headers: Mapping[str, str] = connection.headers

    @property
    def is_at_end(self) -> bool:
        """Whether everything has been read, so that `read_some` would say so without waiting."""
        return self._connection is None or self._connection.is_at_end

    async def read_some(self) -> bytes:
        """Whatever has arrived, at least one byte; empty at the end.

        Raises:
            UpstreamBroken: the engine went away in the middle.
        """
        if self._connection is None:
            return b""
        try:
            return await self._connection.read_some()
        except Broken as error:
            raise _broken(self._worker) from error

    async def pump(self, push: Push) -> None:
        """Give what arrives to `push` at once, until the end or until it takes no more; what it raises comes through.

        Raises:
            UpstreamBroken: the engine went away in the middle.
        """
        if self._connection is None:
            push(b"", True)
            return
        try:
            await self._connection.pump(push)
        except Broken as error:
            raise _broken(self._worker) from error

    async def read_all(self) -> bytes:
        """The rest of the body.

        Raises:
            UpstreamBroken: the engine went away in the middle.
        """
        pieces = []
        while not self.is_at_end:
            pieces.append(await self.read_some())
        return b"".join(pieces)

    def close(self) -> None:
        """Give the connection back if the body was read to its end, else drop it, which tells the engine to stop."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._pool.give_back(self._worker.origin, connection)


class Upstream:
    """Client of all engines; an async context manager.

    Args:
        connect_s: opening a connection takes at most this long.
        keepalive_s: an idle connection is closed after this long.
    """

    def __init__(self, *, connect_s: float, keepalive_s: float) -> None:
        self._pool = Pool(connect_s=connect_s, keepalive_s=keepalive_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._pool.close()

    async def send(self, worker: Worker, path: str, body: bytes, headers: Mapping[str, str]) -> OpenAnswer:
        """POST `body` and wait for the head of the answer.

        Raises:
            UpstreamUnreachable: no connection in time.
            UpstreamBroken: the connection ended before an answer began.
        """
        head = _head("POST", worker, path, headers)
        return await self._exchange(worker, b"%sContent-Length: %d\r\n\r\n%s" % (head, len(body), body))

    async def send_ok(self, worker: Worker, path: str, body: bytes, headers: Mapping[str, str]) -> OpenAnswer:
        """As `send`, for callers who want a success.

        Raises:
            EngineRefused: the status is 400 or above.
        """
        answer = await self.send(worker, path, body, headers)
        if answer.status >= 400:
            raise EngineRefused(worker, await _whole(answer))
        return answer

    async def ask(self, worker: Worker, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """POST `body` and wait for the whole answer; raises as `send`."""
        return await _whole(await self.send(worker, path, body, headers))

    async def ask_ok(self, worker: Worker, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """As `ask`, for callers who want a success.

        Raises:
            EngineRefused: the status is 400 or above.
        """
        return await _whole(await self.send_ok(worker, path, body, headers))

    async def get(self, worker: Worker, path: str, headers: Mapping[str, str]) -> Answer:
        """GET `path` and wait for the whole answer; raises as `send`."""
        return await _whole(await self._exchange(worker, _head("GET", worker, path, headers) + b"\r\n"))

    async def _exchange(self, worker: Worker, request: bytes) -> OpenAnswer:
        try:
            connection = await self._pool.exchange(worker.origin, request)
        except Unreachable as error:
            raise UpstreamUnreachable(f"the {worker.role.value} engine is not reachable") from error
        except Broken as error:
            raise _broken(worker) from error
        return OpenAnswer(worker, connection, self._pool)


def _head(method: str, worker: Worker, path: str, headers: Mapping[str, str]) -> bytes:
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    head = f"{method} {worker.prefix}{path} HTTP/1.1\r\nHost: {worker.name}\r\n{lines}"
    return head.encode("utf-8", "surrogateescape")


async def _whole(answer: OpenAnswer) -> Answer:
    try:
        return Answer(answer.status, answer.headers, await answer.read_all())
    finally:
        answer.close()


def _broken(worker: Worker) -> UpstreamBroken:
    """Engines are named by role only: addresses stay inside."""
    return UpstreamBroken(f"the {worker.role.value} engine broke off its answer")

"""The only HTTP client: sends legs to engines and maps whatever goes wrong to our own errors.

Owns: connections, their reuse, the mapping of client exceptions. Does not know: bodies, retries, deadlines.
"""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import aiohttp
from multidict import CIMultiDictProxy

from common.errors import UpstreamBroken, UpstreamError, UpstreamTimeout, UpstreamUnreachable
from proxy.fleet.worker import Worker

_READ_BUFFER_BYTES = 256 << 10
_LARGE_BODY_BYTES = 512 << 10
# Compression between machines of one rack costs more than it saves, and relayed bytes must stay as they are.
_NO_AUTO_HEADERS = ("Accept-Encoding", "Accept", "User-Agent")


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer of an engine.

    Attributes:
        status: HTTP status.
        headers: as received, case-insensitive.
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

    def __init__(self, worker: Worker, response: aiohttp.ClientResponse) -> None:
        self._worker = worker
        self._response = response
        self.status = response.status
        self.headers: CIMultiDictProxy[str] = response.headers

    async def read_some(self) -> bytes:
        """Whatever has arrived, at least one byte; empty at the end.

        Raises:
            UpstreamBroken: the engine went away in the middle.
        """
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise _mapped(self._worker, error) from error

    async def read_all(self) -> bytes:
        """The rest of the body.

        Raises:
            UpstreamBroken: the engine went away in the middle.
        """
        try:
            return await self._response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise _mapped(self._worker, error) from error

    def close(self) -> None:
        """Give the connection back if the body was read to its end, else drop it, which tells the engine to stop."""
        self._response.release()


class Upstream:
    """Client of all engines; an async context manager.

    Args:
        connect_s: opening a connection takes at most this long.
        keepalive_s: an idle connection is closed after this long.
    """

    def __init__(self, *, connect_s: float, keepalive_s: float) -> None:
        self._connect_s = connect_s
        self._keepalive_s = keepalive_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=self._keepalive_s, ttl_dns_cache=10),
            # Deadlines belong to the callers; a connection is the one wait they cannot see.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=_NO_AUTO_HEADERS,
            read_bufsize=_READ_BUFFER_BYTES,
            trust_env=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(self, worker: Worker, path: str, body: bytes, headers: Mapping[str, str]) -> OpenAnswer:
        """POST `body` and wait for the head of the answer.

        Raises:
            UpstreamUnreachable: no connection.
            UpstreamTimeout: connecting took too long.
            UpstreamBroken: the connection ended before an answer began.
        """
        return await self._open("POST", worker, path, body, headers)

    async def ask(self, worker: Worker, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """POST `body` and wait for the whole answer; raises as `send`."""
        return await self._whole(await self.send(worker, path, body, headers))

    async def ask_ok(self, worker: Worker, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """As `ask`, for callers who want a success.

        Raises:
            EngineRefused: the status is 400 or above.
        """
        answer = await self.ask(worker, path, body, headers)
        if answer.status >= 400:
            raise EngineRefused(worker, answer)
        return answer

    async def get(self, worker: Worker, path: str, headers: Mapping[str, str]) -> Answer:
        """GET `path` and wait for the whole answer; raises as `send`."""
        return await self._whole(await self._open("GET", worker, path, None, headers))

    async def _open(
        self, method: str, worker: Worker, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> OpenAnswer:
        if self._session is None:
            raise RuntimeError("the client is used outside its context")
        # aiohttp writes bytes in one go and a file in pieces; a large body must not hold up everyone else.
        data = io.BytesIO(body) if body is not None and len(body) > _LARGE_BODY_BYTES else body
        try:
            response = await self._session.request(
                method, worker.url(path), data=data, headers=headers, allow_redirects=False
            )
        except (aiohttp.ClientError, OSError) as error:
            raise _mapped(worker, error) from error
        return OpenAnswer(worker, response)

    async def _whole(self, answer: OpenAnswer) -> Answer:
        try:
            return Answer(answer.status, answer.headers, await answer.read_all())
        finally:
            answer.close()


def _mapped(worker: Worker, error: Exception) -> UpstreamError:
    """Our error for the client's; the engine is named by role only, addresses stay inside."""
    name = f"the {worker.role.value} engine"
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return UpstreamUnreachable(f"{name} did not accept a connection in time")
    if isinstance(error, aiohttp.ClientConnectorError):
        return UpstreamUnreachable(f"{name} is not reachable")
    if isinstance(error, TimeoutError):
        return UpstreamTimeout(f"{name} did not answer in time")
    return UpstreamBroken(f"{name} broke off its answer")

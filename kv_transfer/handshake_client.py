"""D's way to P's HTTP port: one short blocking exchange per new peer, off the driver thread.

Owns: sockets and time limits of the handshake. Does not know: what the messages mean (handshake).
"""

import http.client
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from common.errors import HandshakeFailed
from kv_transfer.handshake import MAX_BODY_BYTES, PATH, Answer, HandshakeVisit, HttpReply


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where P's HTTP port is."""

    host: str
    port: int


class HandshakeClient(Protocol):
    """Runs both phases somewhere else."""

    def begin(self, address: PeerAddress, visit: HandshakeVisit, timeout_s: float) -> "Future[Answer]":
        """Start; the future ends with P's answer or a `TransferError`, about `timeout_s` later at the latest."""
        ...

    def close(self) -> None:
        """Start nothing more."""
        ...


class HttpHandshakeClient:
    """The real one: `http.client` on a few threads of its own.

    Args:
        tls: P's port speaks HTTPS, judged by this; None: plain HTTP.
        max_threads: handshakes that may run at the same time; a peer that hangs holds one of them until its timeout.
    """

    def __init__(self, tls: ssl.SSLContext | None = None, max_threads: int = 4) -> None:
        self._tls = tls
        self._executor = ThreadPoolExecutor(max_threads, thread_name_prefix="kv-handshake")

    def begin(self, address: PeerAddress, visit: HandshakeVisit, timeout_s: float) -> "Future[Answer]":
        """Start both phases on a thread."""
        return self._executor.submit(_visit, address, visit, timeout_s, self._tls)

    def close(self) -> None:
        """Running handshakes end by their own timeout."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _visit(address: PeerAddress, visit: HandshakeVisit, timeout_s: float, tls: ssl.SSLContext | None) -> Answer:
    is_cut = threading.Event()
    try:
        with closing(_connection(address, timeout_s, tls)) as connection:
            connection.connect()
            with _cut_after(connection, timeout_s, is_cut):
                visit.judge_offer(_exchange(connection, "GET", None))
                return visit.judge_answer(_exchange(connection, "POST", visit.hello()))
    except (OSError, ValueError, http.client.HTTPException) as error:  # ValueError: a host name that is none
        why = "timed out" if is_cut.is_set() else f"{type(error).__name__} {error}"
        message = f"no handshake with {address.host}:{address.port}: {why}"
        raise HandshakeFailed(message) from error


def _connection(address: PeerAddress, timeout_s: float, tls: ssl.SSLContext | None) -> http.client.HTTPConnection:
    if tls is None:
        return http.client.HTTPConnection(address.host, address.port, timeout=timeout_s)
    return http.client.HTTPSConnection(address.host, address.port, timeout=timeout_s, context=tls)


@contextmanager
def _cut_after(connection: http.client.HTTPConnection, timeout_s: float, is_cut: threading.Event) -> Iterator[None]:
    """End the conversation at its time: a socket's own timeout begins anew with every byte, and a peer may drip."""
    first = connection.sock

    def cut() -> None:
        """On the timer's thread: end it."""
        is_cut.set()
        for connected in (first, connection.sock):  # another one, if P closed the first between the phases
            if connected is not None:
                with suppress(OSError):  # it has ended by itself
                    connected.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(timeout_s, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _exchange(connection: http.client.HTTPConnection, method: str, body: bytes | None) -> HttpReply:
    headers = {} if body is None else {"Content-Type": "application/json"}
    connection.request(method, PATH, body=body, headers=headers)
    response = connection.getresponse()
    content = response.read(MAX_BODY_BYTES + 1)
    if len(content) > MAX_BODY_BYTES:
        raise HandshakeFailed("the peer's handshake is too long")
    return HttpReply(response.status, content)

"""The HTTP side of the handshake against real sockets: it ends within its time, with an answer or a cause."""

import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import HandshakeFailed, IncompatiblePeer
from common.ids import EngineId
from kv_transfer.compatibility import Fingerprint
from kv_transfer.handshake import HandshakeVisit
from kv_transfer.handshake_client import HttpHandshakeClient, PeerAddress
from kv_transfer.interface import EngineIdentity
from tests.support.certificates import self_signed
from tests.support.kv_pair import FINGERPRINT, SECRET, Pair
from tests.support.kv_process import http_port


@pytest.fixture
def client() -> Iterator[HttpHandshakeClient]:
    client = HttpHandshakeClient()
    yield client
    client.close()


def a_visit(fingerprint: Fingerprint = FINGERPRINT) -> HandshakeVisit:
    return HandshakeVisit(EngineIdentity(engine_id=EngineId("D"), fingerprint=fingerprint), EngineId("P1"), SECRET)


def test_both_phases_over_a_real_port(client: HttpHandshakeClient) -> None:
    with http_port(Pair().producer, 0) as port:
        answer = client.begin(PeerAddress("127.0.0.1", port), a_visit(), 5).result(10)
    assert answer.engine_id == "P1"


def test_a_p_that_speaks_tls_is_asked_over_it_when_its_certificate_is_trusted(tmp_path: Path) -> None:
    certificate = self_signed(tmp_path)
    clients = [HttpHandshakeClient(certificate.client()), HttpHandshakeClient(ssl.create_default_context())]
    with http_port(Pair().producer, 0, certificate.server()) as port:
        trusting, doubting = (client.begin(PeerAddress("127.0.0.1", port), a_visit(), 5) for client in clients)
        assert trusting.result(10).engine_id == "P1"
        with pytest.raises(HandshakeFailed, match="certificate"):
            doubting.result(10)
    for client in clients:
        client.close()


def test_tls_and_plain_http_do_not_meet(client: HttpHandshakeClient, tmp_path: Path) -> None:
    certificate = self_signed(tmp_path)
    over_tls = HttpHandshakeClient(certificate.client())
    with http_port(Pair().producer, 0, certificate.server()) as tls, http_port(Pair().producer, 0) as plain:
        for asker, port in ((client, tls), (over_tls, plain)):
            with pytest.raises(HandshakeFailed):
                asker.begin(PeerAddress("127.0.0.1", port), a_visit(), 5).result(10)
    over_tls.close()


def test_the_second_phase_never_happens_when_the_first_finds_a_difference(client: HttpHandshakeClient) -> None:
    pair = Pair()
    with http_port(pair.producer, 0) as port:
        visit = a_visit(Fingerprint(**{**_fields(), "model": "other"}))
        with pytest.raises(IncompatiblePeer, match="model"):
            client.begin(PeerAddress("127.0.0.1", port), visit, 5).result(10)
    assert pair.producer.step() is None  # P never saw a hello


def _fields() -> dict[str, object]:
    return {name: getattr(FINGERPRINT, name) for name in Fingerprint.__struct_fields__}


def test_a_port_where_nobody_listens_fails(client: HttpHandshakeClient) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    with pytest.raises(HandshakeFailed, match="no handshake"):
        client.begin(PeerAddress("127.0.0.1", port), a_visit(), 5).result(10)


@pytest.mark.parametrize("host", ["", "no such host", "a" * 300, "[::", "\udcff"])
def test_a_host_that_is_none_fails(client: HttpHandshakeClient, host: str) -> None:
    with pytest.raises(HandshakeFailed):
        client.begin(PeerAddress(host, 1), a_visit(), 0.2).result(10)


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-x\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab"])
def test_a_peer_that_speaks_something_else_or_breaks_off_fails(client: HttpHandshakeClient, answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def speak() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=speak)
        thread.start()
        with pytest.raises(HandshakeFailed):
            client.begin(PeerAddress("127.0.0.1", server.getsockname()[1]), a_visit(), 5).result(10)
        thread.join()


def test_a_half_open_peer_fails_after_the_timeout(client: HttpHandshakeClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        begun = client.begin(PeerAddress("127.0.0.1", server.getsockname()[1]), a_visit(), 0.1)
        with pytest.raises(HandshakeFailed, match="imed"):
            begun.result(10)


def test_a_peer_that_drips_its_answer_fails_after_the_timeout_all_the_same(client: HttpHandshakeClient) -> None:
    gone = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                while not gone.wait(0.02):  # far more often than any timeout of a socket
                    try:
                        connection.sendall(b" ")
                    except OSError:
                        gone.set()

        thread = threading.Thread(target=drip)
        thread.start()
        begun = client.begin(PeerAddress("127.0.0.1", server.getsockname()[1]), a_visit(), 0.2)
        with pytest.raises(HandshakeFailed):
            begun.result(10)
        assert gone.wait(10)  # the connection was closed from this side
        thread.join()

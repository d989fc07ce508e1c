"""A producer (or a reader) process over real NIXL, told what to do by lines on stdin.

Run as a program: `python kv_process.py CONFIG_JSON`; prints one JSON line per answer. The pool's bytes follow from the
seed, so the reader knows what it must find. With `"reads": true` it is a D, and it has no HTTP port.
"""

import json
import os
import ssl
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from common.clock import SystemClock
from common.ids import BlockId, EngineId, LeaseId, RequestId
from common.wire.kv_layout import KvLayout
from common.wire.kv_params import KvReference, parse
from kv_transfer.backends.nixl_backend import NixlBackend
from kv_transfer.compatibility import Fingerprint
from kv_transfer.consumer import KVConsumer
from kv_transfer.driver import TransferDriver
from kv_transfer.handshake import PATH, HttpReply
from kv_transfer.handshake_client import HttpHandshakeClient
from kv_transfer.interface import ConsumerSettings, EngineIdentity, ProducerSettings
from kv_transfer.producer import KVProducer

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 30, 3, 64
TOKEN_BYTES = NUM_KV_HEADS * HEAD_DIM * 4
FINGERPRINT = Fingerprint(
    model="m", dtype="float32", num_layers=NUM_LAYERS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, tokenizer="t"
)


def pool_of(num_blocks: int, block_size: int, seed: int | None) -> NDArray[np.uint8]:
    """Bytes `[num_blocks, block_bytes]` of a SmolLM2-sized cache: random for a seed, zeros without one."""
    shape = (num_blocks, NUM_LAYERS * 2 * block_size * TOKEN_BYTES)
    if seed is None:
        pool = np.empty(shape, dtype=np.uint8)
        pool.fill(0)  # touches every page, as a pool in use has been
        return pool
    words = np.random.default_rng(seed).integers(0, 1 << 63, (shape[0], shape[1] // 8), dtype=np.uint64)
    return words.view(np.uint8)


def layout_of(pool: NDArray[np.uint8], block_size: int) -> KvLayout:
    return KvLayout(
        base_address=pool.ctypes.data,
        num_blocks=pool.shape[0],
        num_layers=NUM_LAYERS,
        block_size=block_size,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        dtype="float32",
        element_bytes=4,
        device="cpu",
    )


def tokens_of(pool: NDArray[np.uint8], block_size: int, block_ids: Any, start: int, end: int) -> NDArray[np.uint8]:
    """KV bytes of tokens `[start, end)`: `[num_tokens, num_layers * 2, token_bytes]`."""
    ids = list(block_ids)
    blocks = pool[ids].reshape(len(ids), NUM_LAYERS * 2, block_size, TOKEN_BYTES)
    return blocks.transpose(0, 2, 1, 3).reshape(-1, NUM_LAYERS * 2, TOKEN_BYTES)[start:end]


class Desk(Protocol):
    """Whoever answers handshakes."""

    def handshake_offer(self) -> HttpReply: ...

    def handshake_answer(self, body: bytes) -> HttpReply: ...


@contextmanager
def http_port(producer: Desk, port: int, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """Serve `/kv/handshake` on loopback, over TLS where `tls` is given."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._reply(producer.handshake_offer() if self.path == PATH else HttpReply(404, b"{}"))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self._reply(producer.handshake_answer(body))

        def _reply(self, reply: HttpReply) -> None:
            self.send_response(reply.status)
            self.send_header("Content-Length", str(len(reply.body)))
            self._headers_buffer.append(b"\r\n" + reply.body)  # one write: no waiting for a delayed ACK
            self.flush_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def a_consumer(backend: NixlBackend, layout: KvLayout, secret: str | None, **limits: float) -> KVConsumer:
    """D's side on a real HTTP client."""
    settings = ConsumerSettings(
        secret=secret.encode() if secret else None,
        handshake_timeout_s=limits.get("handshake_timeout_s", 5.0),
        pull_timeout_s=limits.get("pull_timeout_s", 30.0),
    )
    identity = EngineIdentity(engine_id=EngineId(backend.name), fingerprint=FINGERPRINT)
    return KVConsumer(backend, layout, identity, settings, SystemClock(), HttpHandshakeClient())


def read(config: dict[str, Any]) -> None:
    """Be a D that announces what it is told and then keeps the leases alive."""
    pool = pool_of(config["num_blocks"], config["block_size"], None)
    backend = NixlBackend(config["engine_id"], environment=config.get("environment", {}))
    consumer = a_consumer(backend, layout_of(pool, config["block_size"]), config.get("secret"))
    driver = TransferDriver(backend, [consumer])
    driver.start()
    say({"pid": os.getpid()})
    for line in sys.stdin:
        reference = parse(json.loads(line))
        if isinstance(reference, KvReference):
            consumer.expect(reference.remote_request_id, reference)
            say(True)


def main() -> None:
    config = json.loads(sys.argv[1])
    if config.get("reads"):
        read(config)
        return
    pool = pool_of(config["num_blocks"], config["block_size"], config["seed"])
    backend = NixlBackend(config["engine_id"], environment=config.get("environment", {}))
    holder: list[KVProducer] = []

    class Late:
        """The port is known only once it is bound, and the producer must know it."""

        def handshake_offer(self) -> HttpReply:
            return holder[0].handshake_offer()

        def handshake_answer(self, body: bytes) -> HttpReply:
            return holder[0].handshake_answer(body)

    with http_port(Late(), config.get("port", 0)) as port:
        secret = config.get("secret")
        producer = KVProducer(
            backend,
            layout_of(pool, config["block_size"]),
            EngineIdentity(engine_id=EngineId(config["engine_id"]), fingerprint=FINGERPRINT),
            ProducerSettings(
                host="127.0.0.1",
                port=port,
                secret=secret.encode() if secret else None,
                lease_ttl_s=config.get("lease_ttl_s", 30.0),
            ),
            SystemClock(),
        )
        holder.append(producer)
        driver = TransferDriver(backend, [producer])
        driver.start()
        say({"port": port, "pid": os.getpid()})
        serve(producer, pool)
        driver.close()


def say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def serve(producer: KVProducer, pool: NDArray[np.uint8]) -> None:
    for line in sys.stdin:
        command = json.loads(line)
        match command["do"]:
            case "hold":
                ids = [BlockId(i) for i in command["block_ids"]]
                reference = producer.hold(RequestId(command["request_id"]), ids, range(command["num_tokens"]))
                say(reference.to_json())
            case "release":
                say(producer.release(LeaseId(command["lease_id"])))
            case "stats":
                stats = producer.stats()
                released = {cause.value: count for cause, count in stats.leases_released.items()}
                say({"held": stats.leases_held, "released": released, "drained": list(producer.poll_released())})
            case "overwrite":
                pool[:] = command["value"]
                say(True)
            case "cpu":
                times = os.times()
                say(times.user + times.system)
            case "quit":
                return


if __name__ == "__main__":
    main()

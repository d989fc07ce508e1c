"""P for `pd-bench kv`: a producer in a process of its own, asked over a pipe.

Owns: the child and the pipe, and a handshake client that takes the pipe instead of HTTP.
"""

import multiprocessing
import os
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.kv.pool import FINGERPRINT, a_layout, a_pool
from common.clock import SystemClock
from common.errors import TransferError
from common.ids import BlockId, EngineId, RequestId
from common.wire.kv_params import KvReference
from kv_transfer.backends.nixl_backend import NixlBackend
from kv_transfer.driver import TransferDriver
from kv_transfer.handshake import Answer, HandshakeVisit
from kv_transfer.handshake_client import PeerAddress
from kv_transfer.interface import EngineIdentity, ProducerSettings
from kv_transfer.producer import KVProducer


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSpec:
    """What the child is."""

    engine_id: str
    num_blocks: int
    block_size: int
    seed: int
    environment: dict[str, str]


class Peer:
    """The child. One question at a time."""

    def __init__(self, spec: PeerSpec) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(spec, theirs), daemon=True)
        self._process.start()
        self.ask("ready")

    def ask(self, name: str, *arguments: Any) -> Any:
        """Ask and wait for the answer."""
        self._pipe.send((name, arguments))
        return self._pipe.recv()

    def hold(self, request: str, block_ids: list[int], num_tokens: int) -> KvReference:
        """A reference to blocks of the child."""
        reference: KvReference = self.ask("hold", request, block_ids, num_tokens)
        return reference

    def close(self) -> None:
        """End the child."""
        self._pipe.send(("quit", ()))
        self._process.join(10)


class PipeHandshake:
    """Both phases over the pipe."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def begin(self, address: PeerAddress, visit: HandshakeVisit, timeout_s: float) -> "Future[Answer]":  # noqa: ARG002 - the port's signature
        """Ask at once."""
        future: Future[Answer] = Future()
        try:
            visit.judge_offer(self._peer.ask("offer"))
            future.set_result(visit.judge_answer(self._peer.ask("answer", visit.hello())))
        except TransferError as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Nothing to close."""


def _serve(spec: PeerSpec, pipe: "Connection[Any, Any]") -> None:
    pool = a_pool(spec.num_blocks, spec.block_size, spec.seed)
    backend = NixlBackend(spec.engine_id, environment=spec.environment)
    identity = EngineIdentity(engine_id=EngineId(spec.engine_id), fingerprint=FINGERPRINT)
    settings = ProducerSettings(host="127.0.0.1", port=1)
    producer = KVProducer(backend, a_layout(pool, spec.block_size), identity, settings, SystemClock())
    driver = TransferDriver(backend, [producer])
    driver.start()
    while True:
        name, arguments = pipe.recv()
        if name == "quit":
            break
        pipe.send(_answer(producer, name, arguments))
    driver.close()


def _answer(producer: KVProducer, name: str, arguments: tuple[Any, ...]) -> Any:
    match name:
        case "offer":
            return producer.handshake_offer()
        case "answer":
            return producer.handshake_answer(*arguments)
        case "hold":
            request, block_ids, num_tokens = arguments
            return producer.hold(RequestId(request), [BlockId(i) for i in block_ids], range(num_tokens))
        case "held":
            return producer.stats().leases_held
        case "cpu_s":
            times = os.times()
            return times.user + times.system
    return None

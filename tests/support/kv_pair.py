"""A producer and a consumer in one process over the memory backend, driven step by step on a manual clock."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from common.clock import ManualClock
from common.errors import HandshakeFailed, TransferError
from common.ids import BlockId, EngineId, RequestId
from common.wire.kv_layout import KvLayout
from common.wire.kv_params import KvReference
from kv_transfer.backends.memory_backend import MemoryBackend, MemoryFabric
from kv_transfer.compatibility import Fingerprint
from kv_transfer.consumer import KVConsumer
from kv_transfer.driver import TransferDriver
from kv_transfer.handshake import Answer, HandshakeDesk, HandshakeVisit
from kv_transfer.handshake_client import PeerAddress
from kv_transfer.interface import ConsumerSettings, EngineIdentity, ProducerSettings, PullOrder, TransferOutcome
from kv_transfer.producer import KVProducer

SECRET = b"shared"
FINGERPRINT = Fingerprint(model="m", dtype="float32", num_layers=2, num_kv_heads=1, head_dim=4, tokenizer="t")


def layout_of(pool: NDArray[np.uint8], block_size: int, num_layers: int = 2) -> KvLayout:
    """Layout of a host pool with one KV head of four float32."""
    return KvLayout(
        base_address=pool.ctypes.data,
        num_blocks=pool.shape[0],
        num_layers=num_layers,
        block_size=block_size,
        num_kv_heads=1,
        head_dim=4,
        dtype="float32",
        element_bytes=4,
        device="cpu",
    )


def pool_of(num_blocks: int, block_size: int, seed: int | None = None) -> NDArray[np.uint8]:
    """A pool `[num_blocks, block_bytes]`, random or zero."""
    shape = (num_blocks, 2 * 2 * block_size * 4 * 4)
    if seed is None:
        return np.zeros(shape, dtype=np.uint8)
    return np.random.default_rng(seed).integers(1, 255, shape, dtype=np.uint8)


def tokens_of(
    pool: NDArray[np.uint8], block_size: int, block_ids: Sequence[int], start: int, end: int
) -> NDArray[np.uint8]:
    """KV bytes of tokens `[start, end)`, `[num_tokens, layers * 2, token_bytes]`, whatever the block size."""
    blocks = pool[list(block_ids)].reshape(len(block_ids), 4, block_size, 16)
    by_token = blocks.transpose(0, 2, 1, 3).reshape(-1, 4, 16)
    return by_token[start:end]


@dataclass
class DirectHandshake:
    """A client that asks the desk in the same process; `answers=False` lets handshakes hang, until `answer_now`."""

    desks: dict[tuple[str, int], HandshakeDesk | KVProducer] = field(default_factory=dict)
    answers: bool = True
    calls: list[PeerAddress] = field(default_factory=list)
    hanging: list[tuple[PeerAddress, HandshakeVisit, "Future[Answer]"]] = field(default_factory=list)

    def begin(self, address: PeerAddress, visit: HandshakeVisit, timeout_s: float) -> "Future[Answer]":
        self.calls.append(address)
        future: Future[Answer] = Future()
        self.hanging.append((address, visit, future))
        if self.answers:
            self.answer_now()
        return future

    def answer_now(self) -> None:
        """Answer the latest call."""
        address, visit, future = self.hanging.pop()
        try:
            producer = self.desks.get((address.host, address.port))
            if not isinstance(producer, KVProducer):
                raise HandshakeFailed("connection refused")
            visit.judge_offer(producer.handshake_offer())
            future.set_result(visit.judge_answer(producer.handshake_answer(visit.hello())))
        except TransferError as error:
            future.set_exception(error)

    def close(self) -> None:
        pass


class Pair:
    """P and D with pools of 16 and 16 blocks."""

    def __init__(
        self,
        p_block_size: int = 4,
        d_block_size: int = 4,
        fingerprint: Fingerprint = FINGERPRINT,
        settings: ConsumerSettings | None = None,
        producer_secret: bytes | None = SECRET,
    ) -> None:
        self.clock = ManualClock()
        self.fabric = MemoryFabric(self.clock)
        self.client = DirectHandshake()
        self.p_block_size, self.d_block_size = p_block_size, d_block_size
        self.d_pool = pool_of(16, d_block_size)
        self.fingerprint = fingerprint
        self.producer_secret = producer_secret
        self.start_producer("P1")
        self.settings = settings or ConsumerSettings(secret=SECRET)
        self.d_backend = MemoryBackend("D", self.fabric)
        self.consumer = KVConsumer(
            self.d_backend,
            layout_of(self.d_pool, d_block_size),
            EngineIdentity(engine_id=EngineId("D"), fingerprint=FINGERPRINT),
            self.settings,
            self.clock,
            self.client,
        )
        self.d_driver = TransferDriver(self.d_backend, [self.consumer])

    def start_producer(self, name: str, seed: int = 1) -> None:
        """Start P, or another P on the same port."""
        self.p_pool = pool_of(16, self.p_block_size, seed)
        self.p_backend = MemoryBackend(name, self.fabric)
        self.producer = KVProducer(
            self.p_backend,
            layout_of(self.p_pool, self.p_block_size),
            EngineIdentity(engine_id=EngineId(name), fingerprint=self.fingerprint),
            ProducerSettings(host="127.0.0.1", port=8100, secret=self.producer_secret, lease_ttl_s=30.0),
            self.clock,
        )
        self.p_driver = TransferDriver(self.p_backend, [self.producer])
        self.client.desks[("127.0.0.1", 8100)] = self.producer

    def hold(self, request: str, num_tokens: int, block_ids: Sequence[int] | None = None) -> KvReference:
        num_blocks = -(-num_tokens // self.p_block_size)
        ids = [BlockId(i) for i in (block_ids or range(3, 3 + num_blocks))]
        return self.producer.hold(RequestId(request), ids, range(num_tokens))

    def order(
        self, request: str, reference: KvReference, start: int = 0, end: int | None = None, first_block: int = 0
    ) -> PullOrder:
        stop = reference.remote_num_tokens if end is None else end
        num_blocks = -(-stop // self.d_block_size) - start // self.d_block_size
        return PullOrder(
            request_id=RequestId(request),
            reference=reference,
            start_token=start,
            end_token=stop,
            block_ids=tuple(BlockId(first_block + i) for i in range(num_blocks)),
        )

    def run(self, rounds: int = 4) -> list[TransferOutcome]:
        """Let both drivers work without the clock moving."""
        for _ in range(rounds):
            self.d_driver.run_once()
            self.p_driver.run_once()
        return list(self.consumer.poll())

    def run_until(self, done: Callable[[], bool], step_s: float = 0.1, limit: int = 1000) -> list[TransferOutcome]:
        """Let time pass until `done`."""
        outcomes: list[TransferOutcome] = []
        for _ in range(limit):
            outcomes += self.run(1)
            if done():
                return outcomes
            self.clock.advance(step_s)
        raise AssertionError("it never happened")

    def pull(self, request: str, reference: KvReference, **where: int) -> TransferOutcome:
        """Expect, pull, and return the outcome."""
        self.consumer.expect(RequestId(request), reference)
        self.consumer.start_pull(self.order(request, reference, **where))
        (outcome,) = self.run()
        return outcome

    @property
    def block_reads(self) -> int:
        """Reads of more than a guard word."""
        return sum(read.num_bytes > 32 for read in self.fabric.reads)

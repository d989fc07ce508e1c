"""One cell of `pd-bench kv`: pulls through producer and consumer, and bare READs of as many bytes, in turns.

Owns: the measurements. A bare READ is one descriptor on an agent of its own, polled without rest.
"""

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.kv.peer import Peer, PeerSpec, PipeHandshake
from benchmarks.kv.pool import FINGERPRINT, a_layout, a_pool
from common.clock import SystemClock
from common.ids import BlockId, EngineId, RequestId
from kv_transfer.backends.backend import Read
from kv_transfer.backends.nixl_backend import NixlBackend
from kv_transfer.consumer import KVConsumer
from kv_transfer.descriptors import RangeList, single_range
from kv_transfer.driver import TransferDriver
from kv_transfer.handshake import Answer, HandshakeVisit
from kv_transfer.interface import ConsumerSettings, EngineIdentity, PullOrder, TransferOutcome, TransferStatus
from kv_transfer.producer import pool_region

PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One size."""

    num_tokens: int
    num_concurrent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """Seconds of each round, all concurrent pulls (or reads) together."""

    cell: Cell
    num_bytes: int
    bare_s: tuple[float, ...]
    pull_s: tuple[float, ...]
    num_descriptors: int
    num_wrong: int


class Bench:
    """D in this process, P in a child.

    Args:
        block_size: tokens per block on both sides.
        num_blocks: of each pool.
        environment: UCX and NIXL variables.
        run_blocks: how many of a prompt's blocks are neighbours in memory.
    """

    def __init__(self, block_size: int, num_blocks: int, environment: dict[str, str], run_blocks: int = 1) -> None:
        self._block_size, self._num_blocks, self._run_blocks = block_size, num_blocks, run_blocks
        self._seed = 7
        self._rng = np.random.default_rng(self._seed)
        suffix = os.urandom(4).hex()
        self._peer_id = f"bench-p-{suffix}"
        self.peer = Peer(
            PeerSpec(
                engine_id=self._peer_id,
                num_blocks=num_blocks,
                block_size=block_size,
                seed=self._seed,
                environment=environment,
            )
        )
        self._pool = a_pool(num_blocks, block_size, None)
        self._wanted = a_pool(num_blocks, block_size, self._seed)
        layout = a_layout(self._pool, block_size)
        backend = NixlBackend(f"bench-d-{suffix}", environment=environment)
        identity = EngineIdentity(engine_id=EngineId(backend.name), fingerprint=FINGERPRINT)
        client = PipeHandshake(self.peer)
        self.consumer = KVConsumer(backend, layout, identity, ConsumerSettings(), SystemClock(), client)
        self._has_outcome = threading.Event()
        self.consumer.on_outcome(self._has_outcome.set)
        self._driver = TransferDriver(backend, [self.consumer])
        self._driver.start()
        self._bare = NixlBackend(f"bench-bare-{suffix}", environment=environment)
        self._bare.register(pool_region(layout))
        self._answer = self._meet(identity)
        self._num_requests = 0

    def _meet(self, identity: EngineIdentity) -> Answer:
        visit = HandshakeVisit(identity, EngineId(self._peer_id), None)
        answer = visit.judge_answer(self.peer.ask("answer", visit.hello()))
        self._bare.add_peer(answer.metadata)
        return answer

    def measure(self, cell: Cell, num_rounds: int) -> CellResult:
        """Pull and read in turns, after two rounds that do not count."""
        num_blocks = -(-cell.num_tokens // self._block_size)
        bare_s, pull_s = [], []
        num_wrong = 0
        before = self.consumer.stats().descriptors
        for number in range(num_rounds + 2):
            bare_s.append(self._read_bare(num_blocks, cell.num_concurrent))
            seconds, wrong = self._pull(cell, num_blocks, whole=number < 2)
            pull_s.append(seconds)
            num_wrong += wrong
        descriptors = self.consumer.stats().descriptors - before
        return CellResult(
            cell=cell,
            num_bytes=num_blocks * self._pool.shape[1] * cell.num_concurrent,
            bare_s=tuple(bare_s[2:]),
            pull_s=tuple(pull_s[2:]),
            num_descriptors=descriptors // (num_rounds + 2),
            num_wrong=num_wrong,
        )

    def idle_cpu(self, seconds: float, num_held: int) -> tuple[float, float]:
        """Shares of a core that P and D use while nothing moves, with `num_held` leases held and renewed."""
        for i in range(num_held):
            reference = self.peer.hold(f"idle{i}", [i % self._num_blocks], 1)
            self.consumer.expect(RequestId(f"idle{i}"), reference)
        time.sleep(0.3)
        at_p, at_d = self.peer.ask("cpu_s"), _cpu_s()
        time.sleep(seconds)
        shares = (self.peer.ask("cpu_s") - at_p) / seconds, (_cpu_s() - at_d) / seconds
        for i in range(num_held):
            self.consumer.abandon(RequestId(f"idle{i}"))
        return shares

    def guard_read_s(self, num_rounds: int = 200) -> float:
        """Median of one read of a guard word: every pull does two."""
        address = self._pool.ctypes.data
        samples = []
        for _ in range(num_rounds):
            begin = time.perf_counter()
            _wait([self._bare.read_ranges(self._peer_id, *_ranges(address, self._answer.guard_address, 32))])
            samples.append(time.perf_counter() - begin)
        return float(np.median(samples))

    def close(self) -> None:
        """End both sides."""
        self._driver.close()
        self._bare.close()
        self.peer.close()

    def _read_bare(self, num_blocks: int, num_reads: int) -> float:
        """One descriptor per read, somewhere in the pools: as cold in the caches as the blocks of a pull are."""
        block_bytes = self._pool.shape[1]
        firsts = self._rng.integers(0, self._num_blocks - num_blocks + 1, (num_reads, 2)) * block_bytes
        local, remote = self._pool.ctypes.data, self._answer.layout.base_address
        pairs = [_ranges(local + int(here), remote + int(there), num_blocks * block_bytes) for here, there in firsts]
        begin = time.perf_counter()
        _wait([self._bare.read_ranges(self._peer_id, *pair) for pair in pairs])
        return time.perf_counter() - begin

    def _pull(self, cell: Cell, num_blocks: int, *, whole: bool) -> tuple[float, int]:
        """Expect everything, as during prefill and grammar; then time from the first order to the last outcome."""
        orders = [self._order(cell, num_blocks) for _ in range(cell.num_concurrent)]
        while self.consumer.stats().expected < len(orders):
            time.sleep(0.0005)
        outcomes: list[TransferOutcome] = []
        self._has_outcome.clear()
        begin = time.perf_counter()
        for order in orders:
            self.consumer.start_pull(order)
        while len(outcomes) < len(orders):
            self._has_outcome.wait(60)
            self._has_outcome.clear()
            outcomes += self.consumer.poll()
        seconds = time.perf_counter() - begin
        return seconds, sum(o.status is not TransferStatus.DONE for o in outcomes) + self._num_wrong(orders, whole)

    def _order(self, cell: Cell, num_blocks: int) -> PullOrder:
        self._num_requests += 1
        name = f"r{self._num_requests}"
        rng = np.random.default_rng(self._num_requests)
        remote_ids = self._place(rng, num_blocks)
        local_ids = self._place(rng, num_blocks)
        reference = self.peer.hold(name, remote_ids, cell.num_tokens)
        self.consumer.expect(RequestId(name), reference)
        return PullOrder(
            request_id=RequestId(name),
            reference=reference,
            start_token=0,
            end_token=cell.num_tokens,
            block_ids=tuple(BlockId(i) for i in local_ids),
        )

    def _place(self, rng: np.random.Generator, num_blocks: int) -> list[int]:
        """Where a prompt's blocks lie: runs of `run_blocks` neighbours, last first, as a pool hands them out."""
        num_runs = self._num_blocks // self._run_blocks
        first = rng.permutation(num_runs)[:, None] * self._run_blocks
        ids = (first + np.arange(self._run_blocks)[::-1]).reshape(-1)
        return [int(i) for i in ids[:num_blocks]]

    def _num_wrong(self, orders: Sequence[PullOrder], whole: bool) -> int:
        """Pulls of this round whose bytes differ; only where none wrote into the blocks of another.

        A whole comparison moves more memory than the pull did and would leave the next round colder caches than any
        engine has, so in rounds that count one byte of every page is compared, each time another one.
        """
        if len(orders) > 1:
            return 0
        pages = slice(None) if whole else slice(int(self._rng.integers(PAGE_BYTES)), None, PAGE_BYTES)
        pairs = zip(orders[0].block_ids, orders[0].reference.remote_block_ids, strict=True)
        return int(
            any(not np.array_equal(self._pool[here, pages], self._wanted[there, pages]) for here, there in pairs)
        )


def _ranges(local: int, remote: int, num_bytes: int) -> tuple[RangeList, RangeList]:
    return single_range(local, num_bytes), single_range(remote, num_bytes)


def _wait(reads: Sequence[Read]) -> None:
    for read in reads:
        while not read.is_done():
            pass
        read.release()


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system

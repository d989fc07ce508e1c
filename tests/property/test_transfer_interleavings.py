"""Many requests over one pair, under any order of events and faults: bytes are right or not accepted, nothing leaks."""

from collections.abc import Iterable

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.ids import BlockId, EngineId, RequestId
from common.wire.kv_params import KvReference
from kv_transfer.interface import ConsumerSettings, PullOrder, TransferStatus
from kv_transfer.peer import PeerState
from tests.support.kv_pair import SECRET, Pair

TOKENS = 8


class TransferMachine(RuleBasedStateMachine):
    """Both sides with an engine's bookkeeping around them: P's and D's blocks are owned by one request at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair(settings=ConsumerSettings(secret=SECRET, pull_timeout_s=0.7, max_pulls=3))
        self.p_free, self.d_free = set(range(16)), set(range(16))
        self.held: dict[str, list[int]] = {}
        self.references: dict[str, KvReference] = {}
        self.started: dict[str, list[int]] = {}
        self.wanted: dict[str, bytes] = {}
        self.known: set[str] = set()
        self.late: set[str] = set()
        self.count = self.num_restarts = 0
        self.pair.fabric.faults.read_delay_s = 0.3
        self.pair.fabric.faults.delays_from_bytes = 33  # time is lost where it matters: while blocks are read

    @precondition(lambda self: len(self.p_free) >= 2 and len(self.d_free) >= 2)
    @rule(pulls_at_once=st.sampled_from([True, True, False]))
    def request(self, pulls_at_once: bool) -> None:
        self.count += 1
        name = f"r{self.count}"
        blocks = [self.p_free.pop(), self.p_free.pop()]
        self.pair.p_pool[blocks] = np.random.default_rng(self.count).integers(1, 255, (2, self.pair.p_pool.shape[1]))
        self.wanted[name] = self.pair.p_pool[blocks].tobytes()
        reference = self.pair.producer.hold(RequestId(name), [BlockId(b) for b in blocks], range(TOKENS))
        self.held[reference.lease_id] = blocks
        self._arrives(name, reference, pulls_at_once)

    @precondition(lambda self: self.known - self.started.keys() and len(self.d_free) >= 2)
    @rule(index=st.integers(0, 30))
    def grammar_is_ready(self, index: int) -> None:
        self._start(self._pick(self.known - self.started.keys(), index))

    @precondition(lambda self: self.started)
    @rule(index=st.integers(0, 30))
    def cancel(self, index: int) -> None:
        self.pair.consumer.cancel(RequestId(self._pick(self.started.keys(), index)))

    @precondition(lambda self: self.known - self.started.keys())
    @rule(index=st.integers(0, 30))
    def abandon(self, index: int) -> None:
        name = self._pick(self.known - self.started.keys(), index)
        self.pair.consumer.abandon(RequestId(name))
        self._forget(name)

    @precondition(lambda self: self.references)
    @rule(index=st.integers(0, 30))
    def proxy_cancels(self, index: int) -> None:
        self.pair.producer.release(self.references[self._pick(self.references.keys(), index)].lease_id)

    @precondition(lambda self: self.references and len(self.d_free) >= 2)
    @rule(index=st.integers(0, 30), pulls_at_once=st.sampled_from([True, True, False]))
    def replay(self, index: int, pulls_at_once: bool) -> None:
        name = self._pick(self.references.keys(), index)
        self.count += 1
        copy = f"copy{self.count}"
        self.wanted[copy] = self.wanted[name]
        self._arrives(copy, self.references[name], pulls_at_once)

    @rule(delay_s=st.sampled_from([0.0, 0.3, 1.0]))
    def wire_slows(self, delay_s: float) -> None:
        self.pair.fabric.faults.read_delay_s = delay_s

    @rule(is_dead=st.booleans())
    def peer_breaks(self, is_dead: bool) -> None:
        self.pair.fabric.faults.dead = {self.pair.p_backend.name} if is_dead else set()

    @rule()
    def connection_is_lost(self) -> None:
        """As after a message that could not be sent: D meets the same P again, while reads from it may be under way."""
        peers = self.pair.consumer._peers
        peer = peers.find(EngineId(self.pair.p_backend.name))
        if peer is not None and peer.state is PeerState.READY:
            peers.lost(peer)

    @rule()
    def p_restarts(self) -> None:
        """Another engine on the same port; whatever the first one held is gone with it."""
        self.num_restarts += 1
        self.pair.p_backend.close()
        self.pair.start_producer(f"P{1 + self.num_restarts}", seed=self.num_restarts)
        self.held.clear()
        self.p_free = set(range(16))

    @rule(loses=st.booleans())
    def messages_get_lost(self, loses: bool) -> None:
        self.pair.fabric.faults.loses_messages = loses

    @rule(seconds=st.sampled_from([0.1, 0.1, 0.2, 0.3, 0.3, 1.0, 31.0]), rounds=st.integers(1, 3))
    def time_passes(self, seconds: float, rounds: int) -> None:
        for _ in range(rounds):
            self.pair.clock.advance(seconds)
            self._collect(1)

    @invariant()
    def blocks_add_up(self) -> None:
        assert len(self.p_free) + sum(len(blocks) for blocks in self.held.values()) == 16
        assert len(self.d_free) + sum(len(blocks) for blocks in self.started.values()) == 16
        self.pair.producer._leases.check_integrity()

    def teardown(self) -> None:
        faults = self.pair.fabric.faults
        faults.read_delay_s, faults.dead, faults.loses_messages = 0.0, set(), False
        for name in self.known - self.started.keys():
            self.pair.consumer.abandon(RequestId(name))
        for _ in range(80):
            self._collect(1)
            self.pair.clock.advance(0.5)
        assert not self.started, "a pull never ended"
        assert (len(self.p_free), len(self.d_free)) == (16, 16)
        stats = self.pair.consumer.stats()
        assert (stats.pulls_running, stats.expected) == (0, 0)

    def _collect(self, rounds: int) -> None:
        for outcome in self.pair.run(rounds):
            if outcome.status is TransferStatus.LATE:
                assert outcome.request_id not in self.late, "told late twice"
                self.late.add(outcome.request_id)
                continue  # nobody waits for it, and its blocks are still written to
            blocks = self.started.pop(outcome.request_id)
            assert outcome.request_id not in self.late or outcome.status is TransferStatus.CANCELLED
            if outcome.status is TransferStatus.DONE:
                assert self.pair.d_pool[blocks].tobytes() == self.wanted[outcome.request_id], "a wrong byte was served"
            self.d_free |= set(blocks)
            # The next owner of the blocks writes at once: a transfer that still wrote would be seen by it.
            self.pair.d_pool[blocks] = 0
            self._forget(outcome.request_id)
        for lease_id in self.pair.producer.poll_released():
            blocks = self.held.pop(lease_id)
            self.pair.p_pool[blocks] = 255  # the next prompt of P
            self.p_free |= set(blocks)
        free = sorted(self.d_free)
        assert not self.pair.d_pool[free].any(), "a transfer wrote into blocks that were given back"

    def _arrives(self, name: str, reference: KvReference, pulls_at_once: bool) -> None:
        self.references[name] = reference
        self.known.add(name)
        self.pair.consumer.expect(RequestId(name), reference)
        if pulls_at_once:
            self._start(name)

    def _start(self, name: str) -> None:
        blocks = [self.d_free.pop(), self.d_free.pop()]
        self.started[name] = blocks
        self.pair.consumer.start_pull(
            PullOrder(
                request_id=RequestId(name),
                reference=self.references[name],
                start_token=0,
                end_token=TOKENS,
                block_ids=tuple(BlockId(b) for b in blocks),
            )
        )

    def _forget(self, name: str) -> None:
        self.known.discard(name)
        self.references.pop(name, None)

    def _pick(self, names: Iterable[str], index: int) -> str:
        ordered = sorted(names)
        return ordered[index % len(ordered)]


TestTransfers = TransferMachine.TestCase
TestTransfers.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)

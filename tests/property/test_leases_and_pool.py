"""Leases over a pool with reference counts: nothing is freed twice or forgotten, under any order of events."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from common.clock import ManualClock
from common.ids import BlockId, EngineId, LeaseId, RequestId
from kv_transfer.guard import GuardTable
from kv_transfer.interface import ReleaseCause
from kv_transfer.lease import LeaseBook

NUM_BLOCKS, NUM_SLOTS, TTL_S = 12, 8, 30.0


class Pool:
    """A block pool as the engine keeps one: a count per block; a prefix may be shared by several leases."""

    def __init__(self) -> None:
        self.counts = [0] * NUM_BLOCKS

    def take(self, blocks: list[BlockId]) -> None:
        for block in blocks:
            self.counts[block] += 1

    def give_back(self, blocks: list[BlockId]) -> None:
        for block in blocks:
            self.counts[block] -= 1
            assert self.counts[block] >= 0, "freed twice"


class LeaseMachine(RuleBasedStateMachine):
    """Holds, heartbeats, completions, aborts, cancels, expiries and polls in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.guard = GuardTable(EngineId("P"), NUM_SLOTS)
        self.book = LeaseBook(self.guard, self.clock, TTL_S)
        self.pool = Pool()
        self.blocks: dict[LeaseId, list[BlockId]] = {}
        self.deadline_s: dict[LeaseId, float] = {}
        self.ended: set[LeaseId] = set()
        self.drained: set[LeaseId] = set()
        self.names: list[LeaseId] = []
        self.by_request: dict[str, list[LeaseId]] = {}
        self.cancelled_early: dict[str, float] = {}

    @rule(request=st.sampled_from("abc"), blocks=st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, unique=True))
    def hold(self, request: str, blocks: list[int]) -> None:
        if self.guard.num_free == 0:
            return
        name = self.book.hold(RequestId(request), lambda _: bytes(32))
        assert name not in self.blocks, "a lease id was reused"
        self.blocks[name] = [BlockId(b) for b in blocks]
        self.pool.take(self.blocks[name])
        self.deadline_s[name] = self.clock.now_s() + TTL_S
        self.names.append(name)
        self.by_request.setdefault(request, []).append(name)
        if self.cancelled_early.pop(request, 0.0) > self.clock.now_s():
            self.ended.add(name)

    @rule(index=st.integers(0, 40), cause=st.sampled_from([ReleaseCause.READ, ReleaseCause.ABORTED]))
    def release(self, index: int, cause: ReleaseCause) -> None:
        if self.names:
            name = self.names[index % len(self.names)]
            assert self.book.release(name, cause) == (name not in self.ended)
            self.ended.add(name)

    @rule(index=st.integers(0, 40))
    def heartbeat(self, index: int) -> None:
        if self.names:
            name = self.names[index % len(self.names)]
            lives = name not in self.ended and self.clock.now_s() < self.deadline_s[name]
            assert self.book.renew(name) == lives
            if lives:
                self.deadline_s[name] = self.clock.now_s() + TTL_S

    @rule(request=st.sampled_from("abc"))
    def cancel(self, request: str) -> None:
        live = {name for name in self.by_request.get(request, []) if name not in self.ended}
        assert self.book.cancel_request(RequestId(request)) == len(live)
        self.ended |= live
        if not live:
            self.cancelled_early[request] = self.clock.now_s() + TTL_S

    @rule(seconds=st.floats(0, 20))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def sweep(self) -> None:
        due = {name for name, at_s in self.deadline_s.items() if name not in self.ended and at_s <= self.clock.now_s()}
        assert self.book.expire() == len(due)
        self.ended |= due

    @rule()
    def engine_polls(self) -> None:
        for name in self.book.drain_released():
            assert name not in self.drained, "drained twice"
            self.drained.add(name)
            self.pool.give_back(self.blocks[name])

    @invariant()
    def everything_adds_up(self) -> None:
        self.book.check_integrity()
        assert self.book.num_held == len(self.blocks) - len(self.ended)
        assert self.guard.num_free == NUM_SLOTS - self.book.num_held
        assert sum(self.book.num_released().values()) == len(self.ended)
        assert sum(self.pool.counts) == sum(len(b) for n, b in self.blocks.items() if n not in self.drained)

    def teardown(self) -> None:
        self.clock.advance(TTL_S)
        self.book.expire()
        self.ended = set(self.blocks)
        self.engine_polls()
        assert self.pool.counts == [0] * NUM_BLOCKS
        assert self.guard.num_free == NUM_SLOTS


TestLeases = LeaseMachine.TestCase
TestLeases.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

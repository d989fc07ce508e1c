"""KV transfer without a transport: a source whose pulls end when the test says so, a sink with leases, and a pair of
them that copies real blocks between two engines in one process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.engine.kv_cache.storage import KvCacheStorage
from common.engine.ports import PullOutcome, PullPlan, PullStatus
from common.errors import TransferError
from common.ids import BlockId, EngineId, LeaseId, RequestId
from common.wire.kv_params import KvReference


def reference_to(
    prompt: Sequence[int], block_size: int, *, request_id: str = "remote", num_tokens: int | None = None
) -> KvReference:
    """A reference to a prompt that only `FakeSource` can read."""
    num_blocks = -(-len(prompt) // block_size)
    return KvReference(
        remote_engine_id=EngineId("p"),
        remote_request_id=RequestId(request_id),
        remote_host="127.0.0.1",
        remote_port=1,
        remote_block_ids=tuple(BlockId(i) for i in range(num_blocks)),
        remote_num_tokens=len(prompt) if num_tokens is None else num_tokens,
        block_size=block_size,
        lease_id=LeaseId(f"lease-{request_id}"),
        lease_ttl_s=30.0,
        prompt_token_ids=tuple(prompt),
    )


@dataclass
class FakeSource:
    """A `KVSource`. Bytes land when a pull is `settle`d, also after a cancel: as late as a transport may write.

    `before_pull` is asked for every plan: the place to assert what must be true by then.
    """

    storage: KvCacheStorage
    before_pull: Callable[[PullPlan], None] = lambda plan: None
    auto: bool = False
    refuse: TransferError | None = None
    expected: list[RequestId] = field(default_factory=list)
    plans: list[PullPlan] = field(default_factory=list)
    running: dict[RequestId, PullPlan] = field(default_factory=dict)
    cancelled: list[RequestId] = field(default_factory=list)
    abandoned: list[RequestId] = field(default_factory=list)
    outcomes: list[PullOutcome] = field(default_factory=list)
    done: list[RequestId] = field(default_factory=list)
    refuse_pulls: bool = False
    told_late: list[RequestId] = field(default_factory=list)

    def expect(self, request_id: RequestId, reference: KvReference) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.expected.append(request_id)

    def start_pull(self, plan: PullPlan) -> None:
        self.before_pull(plan)
        if self.refuse_pulls:
            raise TransferError("the peer is not known here")
        assert plan.request_id in self.expected
        assert plan.request_id not in self.running
        assert plan.start_token % plan.block_size == 0
        self.plans.append(plan)
        self.running[plan.request_id] = plan
        if self.auto:
            self.settle(plan.request_id)

    def settle(self, request_id: RequestId, status: PullStatus = PullStatus.DONE, cause: str | None = None) -> None:
        if status is PullStatus.LATE:
            self.late(request_id)
            return
        plan = self.running.pop(request_id)
        if request_id in self.told_late:  # whatever becomes of the bytes, nobody waits for them
            status = PullStatus.CANCELLED
        if status is not PullStatus.FAILED:
            self._write(plan)
        if status is PullStatus.DONE:
            self.done.append(request_id)
        self.outcomes.append(PullOutcome(request_id=request_id, status=status, cause=cause, reason=cause))

    def late(self, request_id: RequestId) -> None:
        """Its time is over and its bytes are still to come; said at most once, and not of a cancelled pull."""
        if request_id not in self.told_late and request_id not in self.cancelled:
            self.told_late.append(request_id)
            self.outcomes.append(PullOutcome(request_id=request_id, status=PullStatus.LATE, cause="timeout"))

    def cancel(self, request_id: RequestId) -> None:
        self.cancelled.append(request_id)

    def abandon(self, request_id: RequestId) -> None:
        self.abandoned.append(request_id)

    def poll(self) -> Sequence[PullOutcome]:
        outcomes, self.outcomes = self.outcomes, []
        return outcomes

    def _write(self, plan: PullPlan) -> None:
        for position in range(plan.start_token, plan.end_token):
            block_id = plan.block_ids[(position - plan.start_token) // plan.block_size]
            slot = self.storage.tensor[block_id, 0, :, position % plan.block_size, 0, 0]
            slot[0], slot[1] = plan.reference.prompt_token_ids[position], position


@dataclass
class FakeSink:
    """A `KVSink`: leases by counting; the test releases them."""

    block_size: int
    held: dict[LeaseId, tuple[BlockId, ...]] = field(default_factory=dict)
    released: list[LeaseId] = field(default_factory=list)

    def hand_off(
        self, request_id: RequestId, block_ids: Sequence[BlockId], prompt_token_ids: Sequence[int]
    ) -> KvReference:
        lease_id = LeaseId(f"lease-{request_id}")
        self.held[lease_id] = tuple(block_ids)
        return KvReference(
            remote_engine_id=EngineId("p"),
            remote_request_id=request_id,
            remote_host="127.0.0.1",
            remote_port=1,
            remote_block_ids=tuple(block_ids),
            remote_num_tokens=len(prompt_token_ids),
            block_size=self.block_size,
            lease_id=lease_id,
            lease_ttl_s=30.0,
            prompt_token_ids=tuple(prompt_token_ids),
        )

    def give_up(self, request_id: RequestId) -> None:
        if LeaseId(f"lease-{request_id}") in self.held:
            self.release(LeaseId(f"lease-{request_id}"))

    def release(self, lease_id: LeaseId) -> None:
        del self.held[lease_id]
        self.released.append(lease_id)

    def poll_released(self) -> Sequence[LeaseId]:
        released, self.released = self.released, []
        return released


@dataclass
class MemorySource:
    """A `KVSource` that copies blocks out of P's storage at once and releases P's lease."""

    sink: FakeSink
    remote: KvCacheStorage
    local: KvCacheStorage
    references: dict[RequestId, KvReference] = field(default_factory=dict)
    outcomes: list[PullOutcome] = field(default_factory=list)
    num_pulled_tokens: int = 0

    def expect(self, request_id: RequestId, reference: KvReference) -> None:
        self.references[request_id] = reference

    def start_pull(self, plan: PullPlan) -> None:
        first = plan.start_token // plan.block_size
        for index, block_id in enumerate(plan.block_ids):
            source = plan.reference.remote_block_ids[first + index]
            self.local.tensor[block_id].copy_(self.remote.tensor[source])
        self.num_pulled_tokens += plan.end_token - plan.start_token
        self._release(plan.request_id)
        self.outcomes.append(PullOutcome(request_id=plan.request_id, status=PullStatus.DONE))

    def cancel(self, request_id: RequestId) -> None: ...

    def abandon(self, request_id: RequestId) -> None:
        self._release(request_id)

    def poll(self) -> Sequence[PullOutcome]:
        outcomes, self.outcomes = self.outcomes, []
        return outcomes

    def _release(self, request_id: RequestId) -> None:
        reference = self.references.pop(request_id, None)
        if reference is not None:
            self.sink.release(reference.lease_id)

"""P's side: hands out references under leases, answers handshakes, and hears D's notifications.

Journey rows 4, 5 and x. Owns: lease book, guard table, how often P polls. Any thread may call the public methods;
`bind`, `on_message` and `step` are the driver's.
Does not know: the block pool, HTTP.
"""

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from common.clock import Clock
from common.errors import TransferError
from common.ids import BlockId, LeaseId, RequestId
from common.wire.kv_layout import KvLayout
from common.wire.kv_params import KvReference
from kv_transfer import notifications
from kv_transfer.backends.backend import MemoryRegion, Message, TransferBackend
from kv_transfer.guard import GuardTable
from kv_transfer.handshake import Answer, HandshakeDesk, HttpReply
from kv_transfer.interface import EngineIdentity, ProducerSettings, ReleaseCause
from kv_transfer.lease import LeaseBook
from kv_transfer.reference import digest, sign
from kv_transfer.stats import ProducerStats

ATTENDED_POLL_S = 0.00005
"""While D connects or reads over a transport that needs P."""

EAGER_POLL_S, EAGER_FOR_S = 0.001, 0.05
"""Right after a handoff: D usually reads within milliseconds and its `done` frees the blocks."""

HELD_POLL_S = 0.01
"""While leases are held: heartbeats and completions."""

IDLE_POLL_S = 1.0
"""With no lease, once a peer has connected: late messages must not pile up."""

ATTEND_FOR_S = 1.0
"""How long one sign of a connecting or reading D keeps P attentive."""

HELLO_FOR_S = 0.1
"""How much of that is left once a D has said hello."""


class KVProducer:
    """Everything P does for KV transfer.

    Args:
        backend: the agent, not yet known to anyone.
        layout: P's KV pool; registered here.
        identity: engine id (the agent's name) and fingerprint.
        settings: address, secret, lease length.
        clock: for leases and pace.
        wake: called (from any thread) when `poll_released` has something.
    """

    def __init__(
        self,
        backend: TransferBackend,
        layout: KvLayout,
        identity: EngineIdentity,
        settings: ProducerSettings,
        clock: Clock,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._backend, self._layout, self._identity = backend, layout, identity
        self._settings, self._clock, self._wake = settings, clock, wake
        guard = GuardTable(identity.engine_id, settings.max_leases)
        self._leases = LeaseBook(guard, clock, settings.lease_ttl_s)
        backend.register(pool_region(layout))
        backend.register(guard.region)
        answer = Answer(
            engine_id=identity.engine_id,
            metadata=backend.metadata(),
            layout=layout,
            guard_address=guard.region.address,
            guard_slots=settings.max_leases,
        )
        self._desk = HandshakeDesk(identity, answer, settings.secret)
        self._wake_driver: Callable[[], None] = lambda: None
        self._attended_until_s: dict[LeaseId, float] = {}
        self._connecting_until_s = self._eager_until_s = float("-inf")
        self._failure: str | None = None
        self._has_peers = False
        self._num_late = self._num_unreadable = 0

    def hold(self, request_id: RequestId, block_ids: Sequence[BlockId], prompt_token_ids: Sequence[int]) -> KvReference:
        """Open a lease on the blocks and say where they are. Immediate; any thread.

        Args:
            request_id: whose prompt.
            block_ids: in sequence order, `ceil(len(prompt) / block_size)` of them.
            prompt_token_ids: whose KV the blocks hold, all of it.

        Raises:
            QueueFull: `max_leases` are held.
            TransferError: the transfer driver is dead.
        """
        if self._failure is not None:
            raise TransferError(f"KV cannot be handed over: {self._failure}")
        unnamed = KvReference(
            remote_engine_id=self._identity.engine_id,
            remote_request_id=request_id,
            remote_host=self._settings.host,
            remote_port=self._settings.port,
            remote_block_ids=tuple(block_ids),
            remote_num_tokens=len(prompt_token_ids),
            block_size=self._layout.block_size,
            lease_id=LeaseId(""),
            lease_ttl_s=self._settings.lease_ttl_s,
            prompt_token_ids=tuple(prompt_token_ids),
        )
        name = self._leases.hold(request_id, lambda lease_id: digest(replace(unnamed, lease_id=lease_id)))
        if self._failure is not None:  # in that very moment: nobody would ever end this one
            self._leases.release(name, ReleaseCause.CANCELLED)
            raise TransferError(f"KV cannot be handed over: {self._failure}")
        self._eager_until_s = self._clock.now_s() + EAGER_FOR_S
        self._wake_driver()
        return sign(replace(unnamed, lease_id=name), self._settings.secret)

    def poll_released(self) -> Sequence[LeaseId]:
        """Leases that ended since the last call, each exactly once; their blocks are the engine's again."""
        return self._leases.drain_released()

    def release(self, lease_id: LeaseId) -> bool:
        """The proxy or the engine gives a handoff up; False when the lease is over already. Any thread."""
        return self._ended(self._leases.release(lease_id, ReleaseCause.CANCELLED))

    def cancel_request(self, request_id: RequestId) -> None:
        """Give up every handoff of a request, also one that is still to come. Any thread."""
        self._ended(self._leases.cancel_request(request_id) > 0)

    def handshake_offer(self) -> HttpReply:
        """Body of GET `/kv/handshake`."""
        return self._desk.offer()

    def handshake_answer(self, body: bytes) -> HttpReply:
        """Body of POST `/kv/handshake`; D connects right after it, so P begins to attend."""
        reply = self._desk.answer(body)
        if reply.status == 200:
            self._has_peers = True
            self._connecting_until_s = self._clock.now_s() + ATTEND_FOR_S
            self._wake_driver()
        return reply

    def stats(self) -> ProducerStats:
        """Counts since the start."""
        return ProducerStats(
            leases_held=self._leases.num_held,
            leases_released=self._leases.num_released(),
            late_notifications=self._num_late,
            unreadable_notifications=self._num_unreadable,
        )

    def bind(self, wake_driver: Callable[[], None]) -> None:
        """Remember how to wake the driver."""
        self._wake_driver = wake_driver

    def on_message(self, message: Message) -> None:
        """Act on one of D's notifications; bytes that are none of ours are counted and dropped."""
        match notifications.decode(message.payload):
            case notifications.Hello():
                # Another D may be connecting at the same time: a short while longer.
                self._connecting_until_s = min(self._connecting_until_s, self._clock.now_s() + HELLO_FOR_S)
            case notifications.Attend(lease_id):
                if self._leases.renew(lease_id):
                    self._attend(lease_id)
            case notifications.Heartbeat(lease_ids):
                for lease_id in lease_ids:
                    self._num_late += not self._leases.renew(lease_id)
            case notifications.Done(lease_id):
                self._notified_end(lease_id, ReleaseCause.READ)
            case notifications.Abort(lease_id):
                self._notified_end(lease_id, ReleaseCause.ABORTED)
            case None:
                self._num_unreadable += 1

    def step(self) -> float | None:
        """Expire leases; how soon to poll again."""
        self._ended(self._leases.expire() > 0)
        now_s = self._clock.now_s()
        if now_s < max(self._connecting_until_s, *self._attended_until_s.values(), float("-inf")):
            return ATTENDED_POLL_S
        self._attended_until_s.clear()
        next_expiry_s = self._leases.next_expiry_s()
        if next_expiry_s is None:
            return IDLE_POLL_S if self._has_peers else None
        return min(next_expiry_s, EAGER_POLL_S if now_s < self._eager_until_s else HELD_POLL_S)

    def fail(self, reason: str) -> None:
        """The driver is dead: no lease can be renewed, ended by D or expired any more, so all of them end now."""
        self._failure = reason
        self._ended(self._leases.release_all(ReleaseCause.CANCELLED) > 0)

    def _attend(self, lease_id: LeaseId) -> None:
        self._attended_until_s[lease_id] = self._clock.now_s() + ATTEND_FOR_S

    def _notified_end(self, lease_id: LeaseId, cause: ReleaseCause) -> None:
        self._num_late += not self._ended(self._leases.release(lease_id, cause))
        self._attended_until_s.pop(lease_id, None)

    def _ended(self, has_ended: bool) -> bool:
        if has_ended:
            self._wake()
        return has_ended


def pool_region(layout: KvLayout) -> MemoryRegion:
    """The KV pool's memory."""
    return MemoryRegion(
        address=layout.base_address,
        num_bytes=layout.total_bytes,
        device=layout.device,
        device_index=layout.device_index,
    )

"""The life of one remote prompt on D, from the moment it is known to the end of its pull.

    EXPECTED ─start_pull─► QUEUED ─peer ready─► CHECKING ─guard held─► READING ─► CONFIRMING ─guard held─► DONE
        └───────────┴────────────┴─────────────────┴──────────────────────┴─────────────► FAILED, CANCELLED, ABANDONED

Owns: the states and the record. Does not know: how bytes move (puller), peers.
"""

from dataclasses import dataclass, field
from enum import Enum

from common.ids import EngineId, LeaseId, RequestId
from common.state_machine import Transitions
from common.wire.kv_params import KvReference
from kv_transfer.backends.backend import Read
from kv_transfer.endpoint import GuardRead
from kv_transfer.interface import Failure, PullOrder

LeaseKey = tuple[EngineId, LeaseId]
"""A lease's name among all peers."""


class PullState(Enum):
    """Where a pull stands."""

    EXPECTED = "expected"
    QUEUED = "queued"
    CHECKING = "checking"
    READING = "reading"
    CONFIRMING = "confirming"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    ABANDONED = "abandoned"


_ENDS = {PullState.FAILED, PullState.CANCELLED}
ENDED = {PullState.DONE, *_ENDS}
"""The pull is over, and its outcome is due."""

PULL_TRANSITIONS = Transitions(
    {
        PullState.EXPECTED: {PullState.QUEUED, PullState.ABANDONED},
        PullState.QUEUED: {PullState.CHECKING, *_ENDS},
        # -> QUEUED: the connection broke before a block was touched; one new handshake
        PullState.CHECKING: {PullState.QUEUED, PullState.READING, PullState.CONFIRMING, *_ENDS},
        # While READING, only the transport's own end leads on: bytes may land until then.
        PullState.READING: {PullState.CONFIRMING, *_ENDS},
        PullState.CONFIRMING: {PullState.DONE, *_ENDS},
        PullState.DONE: set(),
        PullState.FAILED: set(),
        PullState.CANCELLED: set(),
        PullState.ABANDONED: set(),
    }
)


@dataclass(slots=True, eq=False)
class Pull:
    """One request's remote KV. Owned by the driver thread; `move_to` is the one writer of `state`.

    Attributes:
        beat_at_s: when the next heartbeat is due.
        slot: guard slot on P.
        generation: what must stand in it.
        digest: of the reference.
        owns_lease: the reference was checked, and no other request has its lease.
        failure: known before `start_pull` (bad reference, failed handshake); reported then.
        is_cancelled: nobody waits for it any more.
        is_late: it was reported as late; its end is all that is still to be told.
        guard_read: its guard word, read before the blocks and after them; kept from the first read to the end.
        read: the blocks.
        has_reconnected: a broken connection was renewed once for this pull.
        num_descriptors: of the posted read, before the transport merges.
    """

    request_id: RequestId
    reference: KvReference
    beat_at_s: float
    slot: int = 0
    generation: bytes = b""
    digest: bytes = b""
    owns_lease: bool = False
    state: PullState = field(default=PullState.EXPECTED)
    order: PullOrder | None = None
    started_at_s: float = 0.0
    deadline_s: float = 0.0
    attend_at_s: float = 0.0
    failure: Failure | None = None
    is_cancelled: bool = False
    is_late: bool = False
    guard_read: GuardRead | None = None
    read: Read | None = None
    has_reconnected: bool = False
    num_bytes: int = 0
    num_descriptors: int = 0

    @property
    def lease_id(self) -> LeaseId:
        """P's lease."""
        return self.reference.lease_id

    @property
    def lease_key(self) -> LeaseKey:
        """That lease among those of all peers."""
        return self.peer_id, self.lease_id

    @property
    def peer_id(self) -> EngineId:
        """P's engine id."""
        return self.reference.remote_engine_id

    def move_to(self, state: PullState) -> None:
        """Raise `IllegalTransition` unless the table has the move."""
        PULL_TRANSITIONS.check(self.state, state)
        self.state = state

"""One engine that D reads from.

    CONNECTING ─HTTP handshake─► GREETING ─word 0 read and right─► READY ─► GONE
         └───────────────────────────┴─► FAILED (answers for `peer_backoff_s`, then a new attempt)

Owns: its states and record. Does not know: how it is connected (peers).
"""

from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum

from common.ids import EngineId
from common.state_machine import Transitions
from kv_transfer import notifications
from kv_transfer.backends.backend import PreparedGrid
from kv_transfer.endpoint import GuardRead, PeerWords
from kv_transfer.handshake import Answer, HandshakeVisit
from kv_transfer.handshake_client import PeerAddress
from kv_transfer.interface import Failure


class PeerState(Enum):
    """Where a peer stands."""

    CONNECTING = "connecting"
    GREETING = "greeting"
    READY = "ready"
    FAILED = "failed"
    GONE = "gone"


PEER_TRANSITIONS = Transitions(
    {
        PeerState.CONNECTING: {PeerState.GREETING, PeerState.FAILED, PeerState.GONE},
        PeerState.GREETING: {PeerState.READY, PeerState.FAILED, PeerState.GONE},
        PeerState.READY: {PeerState.GONE},
        PeerState.FAILED: {PeerState.GONE},
        PeerState.GONE: set(),
    }
)


@dataclass(slots=True, eq=False)
class Peer:
    """One connection's life. `move_to` is the one writer of `state`.

    Attributes:
        call: the HTTP exchange.
        answer: P's metadata, pool and guard table, from GREETING on.
        grid: P's pool, prepared for reading.
        words: P's guard table, and who reads from P.
        greeting: word 0 in flight.
        failure: why it is FAILED, until `retry_at_s`.
        outbox: messages for P that wait for READY.
        attends: whether reads from it were seen to need P's help (tcp), so that P is told at once.
    """

    engine_id: EngineId
    address: PeerAddress
    visit: HandshakeVisit
    call: "Future[Answer]"
    deadline_s: float
    used_at_s: float
    state: PeerState = field(default=PeerState.CONNECTING)
    answer: Answer | None = None
    grid: PreparedGrid | None = None
    words: PeerWords | None = None
    greeting: GuardRead | None = None
    failure: Failure | None = None
    retry_at_s: float = 0.0
    outbox: list[notifications.Notification] = field(default_factory=list)
    attends: bool = False

    @property
    def is_read_from(self) -> bool:
        """Whether reads are in flight, or may still be posted: its memory map must stay."""
        return self.words is not None and self.words.num_reads > 0

    def move_to(self, state: PeerState) -> None:
        """Raise `IllegalTransition` unless the table has the move."""
        PEER_TRANSITIONS.check(self.state, state)
        self.state = state

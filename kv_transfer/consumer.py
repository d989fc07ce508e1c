"""D's side: knows which remote prompts are wanted, keeps their leases alive, and pulls them when told.

Journey rows 5 to 7 and x. Owns: commands from other threads, heartbeats, outcomes, D's memory of consumed leases.
Any thread may call the public methods; `bind`, `on_message`, `step` and `fail` are the driver's.
Does not know: grammar, scheduling. Nothing is read before `start_pull`: that is how D's grammar gate holds.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from threading import Lock

import structlog

from common.clock import Clock
from common.errors import ReferenceRefused
from common.ids import RequestId
from common.wire.kv_layout import KvLayout
from common.wire.kv_params import KvReference
from kv_transfer import notifications
from kv_transfer import reference as references
from kv_transfer.backends.backend import Message, TransferBackend
from kv_transfer.endpoint import Endpoint, GuardReads
from kv_transfer.handshake_client import HandshakeClient
from kv_transfer.interface import (
    ConsumerSettings,
    EngineIdentity,
    Failure,
    FailureCause,
    PullOrder,
    TransferOutcome,
    TransferStatus,
)
from kv_transfer.peer import PeerState
from kv_transfer.peers import PeerBook
from kv_transfer.producer import pool_region
from kv_transfer.puller import Puller
from kv_transfer.stats import ConsumerStats, Histogram
from kv_transfer.transfer import ENDED, LeaseKey, Pull, PullState

_LOG = structlog.get_logger(__name__)
FIRST_BEAT_S = 0.25
"""A request that pulls at once needs no heartbeat."""

REMEMBERED_LEASES = 65_536
"""How many consumed leases D can name as replayed by itself; older ones are caught by P's guard word."""

TIGHT_FOR_S = 0.002
"""A pull is polled without rest at first,"""

BRISK_FOR_S, PULL_POLL_S = 1.0, 0.00005
"""then with short rests (over tcp the peer needs a core, too),"""

STUCK_POLL_S = 0.001
"""and then with longer ones: the peer has probably stopped."""

LINGER_S, LINGER_POLL_S = 1.0, 0.002
"""After a message the transport may need progress to get it out: the first one to a peer opens a connection, to which
the peer must contribute. (With 0.01 s a message in fifty never left while other processes held the cores.)"""


class KVConsumer:
    """Everything D does for KV transfer.

    Args:
        backend: the agent.
        layout: D's KV pool; registered here.
        identity: engine id (the agent's name) and fingerprint.
        settings: secret and time limits.
        clock: for deadlines and heartbeats.
        client: runs the HTTP part of handshakes.
    """

    def __init__(
        self,
        backend: TransferBackend,
        layout: KvLayout,
        identity: EngineIdentity,
        settings: ConsumerSettings,
        clock: Clock,
        client: HandshakeClient,
    ) -> None:
        backend.register(pool_region(layout))
        self._endpoint = Endpoint(backend, layout, identity, settings, clock)
        guard_reads = GuardReads(backend, settings.max_pulls)
        self._client = client
        self._wake_driver: Callable[[], None] = lambda: None
        self._wake_engine: Callable[[], None] = lambda: None
        self._peers = PeerBook(self._endpoint, guard_reads, client, lambda: self._wake_driver())
        self._puller = Puller(self._endpoint, self._peers, guard_reads)
        self._commands: deque[Callable[[], None]] = deque()
        self._outcomes: deque[TransferOutcome] = deque()
        self._pulls: dict[RequestId, Pull] = {}
        self._leases: dict[LeaseKey, RequestId] = {}
        self._consumed: OrderedDict[LeaseKey, None] = OrderedDict()
        self._failure: str | None = None
        self._failing = Lock()
        self._num_done = self._num_cancelled = self._num_bytes = self._num_descriptors = 0
        self._num_failed = dict.fromkeys(FailureCause, 0)
        self._seconds = Histogram()

    # Commands, from any thread

    def on_outcome(self, wake: Callable[[], None]) -> None:
        """Call `wake` (on the driver thread) whenever `poll` has something. Once, before the driver starts."""
        self._wake_engine = wake

    def expect(self, request_id: RequestId, reference: KvReference) -> None:
        """The request is known here: shake hands and keep P's lease alive, but read nothing."""
        self._command(lambda: self._expect(request_id, reference))

    def start_pull(self, order: PullOrder) -> None:
        """Read. Its outcome comes by `poll`; until then the order's blocks belong to the transport."""
        self._command(lambda: self._start(order))

    def cancel(self, request_id: RequestId) -> None:
        """The pull is not wanted any more; its outcome still comes, when nothing writes into its blocks."""
        self._command(lambda: self._cancel(request_id))

    def abandon(self, request_id: RequestId) -> None:
        """The request will never pull: P may release. Idempotent; a running pull is cancelled."""
        self._command(lambda: self._abandon(request_id))

    def dismiss(self, reference: KvReference) -> None:
        """D will not serve the request of this reference (refused before it got an id): P may release."""
        self._command(lambda: self._dismiss(reference))

    def poll(self) -> Sequence[TransferOutcome]:
        """Outcomes since the last call."""
        outcomes = []
        while self._outcomes:
            outcomes.append(self._outcomes.popleft())
        return outcomes

    def stats(self) -> ConsumerStats:
        """Counts since the start."""
        states = [pull.state for pull in tuple(self._pulls.values())]
        num_expected = states.count(PullState.EXPECTED)
        return ConsumerStats(
            pulls_done=self._num_done,
            pulls_cancelled=self._num_cancelled,
            pulls_failed=dict(self._num_failed),
            pulls_running=len(states) - num_expected,
            expected=num_expected,
            bytes_pulled=self._num_bytes,
            descriptors=self._num_descriptors,
            pull_seconds=self._seconds.value(),
            handshakes=self._peers.num_handshakes,
            handshake_failures=self._peers.num_failures,
            peers_ready=self._peers.num_ready,
        )

    def close(self) -> None:
        """Begin no more handshakes. After the driver was closed."""
        self._client.close()

    # The driver's side

    def bind(self, wake_driver: Callable[[], None]) -> None:
        """Remember how to wake the driver."""
        self._wake_driver = wake_driver

    def on_message(self, message: Message) -> None:
        """P sends nothing to D."""

    def step(self) -> float | None:
        """Take commands, connect, pull, send heartbeats; how soon to do it again."""
        while self._commands:
            self._commands.popleft()()
        delays = [self._peers.step()]
        for pull in tuple(self._pulls.values()):
            if pull.state is not PullState.EXPECTED:
                self._puller.advance(pull)
                self._settle(pull)
        delays += [self._wait_s(pull) for pull in self._pulls.values()]
        delays.append(self._beat())
        if self._endpoint.clock.now_s() < self._peers.told_at_s + LINGER_S:
            delays.append(LINGER_POLL_S)
        wanted = [delay for delay in delays if delay is not None]
        return min(wanted) if wanted else None

    def fail(self, reason: str) -> None:
        """The driver is dead: every pull fails, now and from now on, on whatever thread asks for one."""
        with self._failing:
            self._failure = reason
            while self._commands:
                self._commands.popleft()()
            for pull in tuple(self._pulls.values()):
                if pull.state is not PullState.EXPECTED:
                    self._finish(pull, TransferStatus.FAILED, Failure(FailureCause.DISCONNECTED, reason))

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._wake_driver()
        if self._failure is not None:
            self.fail(self._failure)

    def _expect(self, request_id: RequestId, reference: KvReference) -> None:
        if request_id in self._pulls:
            return
        now_s = self._endpoint.clock.now_s()
        pull = Pull(request_id, reference, now_s + min(FIRST_BEAT_S, reference.lease_ttl_s / 3))
        self._pulls[request_id] = pull
        try:
            self._admit(pull)
        except ReferenceRefused as error:
            pull.failure = Failure(FailureCause.REFUSED, str(error))
            _LOG.warning("kv_transfer.reference_refused", request_id=request_id, why=str(error))
            return
        self._peers.obtain(reference)

    def _admit(self, pull: Pull) -> None:
        """Refuse what must never be read; mark the lease as this request's."""
        reference, endpoint = pull.reference, self._endpoint
        pull.digest = references.check(reference, endpoint.settings.secret, endpoint.identity.engine_id)
        if pull.lease_key in self._consumed or pull.lease_key in self._leases:
            raise ReferenceRefused("the reference was used before")
        pull.slot, pull.generation = references.parse_lease_id(reference.lease_id)
        pull.owns_lease = True
        self._leases[pull.lease_key] = pull.request_id

    def _start(self, order: PullOrder) -> None:
        pull = self._pulls.get(order.request_id)
        if pull is None:
            self._expect(order.request_id, order.reference)
            pull = self._pulls[order.request_id]
        now_s = self._endpoint.clock.now_s()
        pull.order, pull.started_at_s = order, now_s
        pull.deadline_s = now_s + self._endpoint.settings.pull_timeout_s
        if pull.failure is None and order.end_token > pull.reference.remote_num_tokens:
            pull.failure = Failure(FailureCause.REFUSED, "the reference holds fewer tokens than are wanted")
        pull.move_to(PullState.QUEUED)
        if self._failure is None:
            self._puller.advance(pull)  # at once: over shared memory all of the copying happens in here
            self._settle(pull)

    def _cancel(self, request_id: RequestId) -> None:
        pull = self._pulls.get(request_id)
        if pull is not None:
            pull.is_cancelled = True
            if pull.state is PullState.EXPECTED:
                self._finish(pull, TransferStatus.CANCELLED, None)

    def _abandon(self, request_id: RequestId) -> None:
        pull = self._pulls.get(request_id)
        if pull is None:
            return
        if pull.state is not PullState.EXPECTED:
            pull.is_cancelled = True
            return
        pull.move_to(PullState.ABANDONED)
        self._forget(pull)
        self._tell_abort(pull)

    def _dismiss(self, reference: KvReference) -> None:
        pull = Pull(RequestId(""), reference, float("inf"))
        try:
            self._admit(pull)
        except ReferenceRefused:
            return  # forged, or another request's: nothing of it may be released
        self._peers.obtain(reference)
        self._forget(pull)
        self._tell_abort(pull)

    def _settle(self, pull: Pull) -> None:
        """Report what has ended; only then is the transport given back what it kept, which costs as much again."""
        if pull.state is PullState.DONE:
            self._num_bytes += pull.num_bytes
            self._num_descriptors += pull.num_descriptors
            self._seconds.observe(self._endpoint.clock.now_s() - pull.started_at_s)
            self._finish(pull, TransferStatus.DONE, None)
        elif pull.state is PullState.FAILED:
            self._finish(pull, TransferStatus.FAILED, pull.failure)
        elif pull.state is PullState.CANCELLED:
            self._finish(pull, TransferStatus.CANCELLED, None)
        elif pull.state is PullState.READING and not pull.is_cancelled and self._endpoint.is_past(pull.deadline_s):
            # P stopped in the middle, and the transport does not end: nobody has to wait for it.
            pull.is_late = pull.is_cancelled = True
            self._report(pull, TransferStatus.LATE, Failure(FailureCause.TIMEOUT, "the pull did not end in time"))
        if pull.state in ENDED:
            self._puller.let_go(pull)

    def _finish(self, pull: Pull, status: TransferStatus, failure: Failure | None) -> None:
        """Report, then tell P: the engine is not kept waiting for the notification."""
        self._forget(pull)
        self._report(pull, status, failure)
        self._num_done += status is TransferStatus.DONE
        self._num_cancelled += status is TransferStatus.CANCELLED and not pull.is_late
        if status is TransferStatus.DONE:
            self._tell(pull, notifications.Done(pull.lease_id))
        else:
            self._tell_abort(pull)

    def _report(self, pull: Pull, status: TransferStatus, failure: Failure | None) -> None:
        cause, reason = (failure.cause, failure.reason) if failure else (None, None)
        self._outcomes.append(TransferOutcome(request_id=pull.request_id, status=status, cause=cause, reason=reason))
        self._wake_engine()
        if cause is not None:
            self._num_failed[cause] += 1
            _LOG.warning("kv_transfer.pull_failed", request_id=pull.request_id, cause=cause.value, why=reason)

    def _forget(self, pull: Pull) -> None:
        self._pulls.pop(pull.request_id, None)
        if self._leases.get(pull.lease_key) == pull.request_id:
            del self._leases[pull.lease_key]
        if pull.owns_lease:
            self._consumed[pull.lease_key] = None
            while len(self._consumed) > REMEMBERED_LEASES:
                self._consumed.popitem(last=False)

    def _tell_abort(self, pull: Pull) -> None:
        self._tell(pull, notifications.Abort(pull.lease_id))

    def _tell(self, pull: Pull, message: notifications.Notification) -> None:
        """Only about leases that are this pull's own: a replayed reference must not end another request's lease."""
        peer = self._peers.find(pull.peer_id)
        if pull.owns_lease and peer is not None and self._failure is None:
            self._peers.tell(peer, message)

    def _beat(self) -> float | None:
        """Renew every live lease whose time has come, one message per peer; seconds until the next one is due."""
        now_s = self._endpoint.clock.now_s()
        due: dict[str, list[Pull]] = {}
        for pull in self._pulls.values():
            if pull.owns_lease and now_s >= pull.beat_at_s:
                due.setdefault(pull.peer_id, []).append(pull)
        for pulls in due.values():
            peer = self._peers.obtain(pulls[0].reference)  # a handshake that failed gets another chance
            if peer.state is PeerState.READY:
                self._peers.tell(peer, notifications.Heartbeat(tuple(pull.lease_id for pull in pulls)))
            for pull in pulls:
                wait_s = pull.reference.lease_ttl_s / 3
                pull.beat_at_s = now_s + (wait_s if peer.state is PeerState.READY else min(1.0, wait_s))
        beats = [pull.beat_at_s - now_s for pull in self._pulls.values() if pull.owns_lease]
        return min(beats) if beats else None

    def _wait_s(self, pull: Pull) -> float | None:
        """Pulls that read are polled tightly; one that waits for a handshake is woken by it."""
        if pull.state is PullState.EXPECTED:
            return None
        if pull.state is PullState.QUEUED:
            return min(0.05, max(0.0, pull.deadline_s - self._endpoint.clock.now_s()))
        reading_s = self._endpoint.clock.now_s() - pull.started_at_s
        if reading_s < TIGHT_FOR_S:
            return 0.0
        return PULL_POLL_S if reading_s < BRISK_FOR_S else STUCK_POLL_S

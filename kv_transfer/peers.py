"""The engines D reads from: connected once, greeted, kept while in use, forgotten when idle, dead or replaced.

Journey row 7. Owns: handshakes and peers' memory maps. Driver thread only. A restarted peer has a new engine id, so it
is a new peer, and the one it replaced on the same address is forgotten.
Does not know: requests, leases.
"""

from collections.abc import Callable

import structlog

from common.errors import HandshakeFailed, IncompatiblePeer, PeerDisconnected, ReferenceRefused, TransferError
from common.ids import EngineId
from common.wire.kv_params import KvReference
from kv_transfer import guard, notifications
from kv_transfer.backends.backend import BlockGrid
from kv_transfer.descriptors import layout_differences
from kv_transfer.endpoint import Endpoint, GuardReads, PeerWords
from kv_transfer.handshake import Answer, HandshakeVisit
from kv_transfer.handshake_client import HandshakeClient, PeerAddress
from kv_transfer.interface import Failure, FailureCause
from kv_transfer.peer import Peer, PeerState

_LOG = structlog.get_logger(__name__)
GREETING_POLL_S = 0.0002
"""While a connection comes up, which takes some milliseconds of both sides."""

LEAVING_POLL_S = 0.05
"""How often reads of peers that are gone are looked at."""


class PeerBook:
    """All peers.

    Args:
        endpoint: D's side.
        guard_reads: for greetings.
        client: runs the HTTP part.
        on_answered: called, on another thread, when a handshake's HTTP part has ended.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        guard_reads: GuardReads,
        client: HandshakeClient,
        on_answered: Callable[[], None],
    ) -> None:
        self._endpoint, self._guard_reads, self._client = endpoint, guard_reads, client
        self._on_answered = on_answered
        self._peers: dict[EngineId, Peer] = {}
        self._leaving: list[Peer] = []
        self._added: set[EngineId] = set()
        self.told_at_s = float("-inf")
        """When a message was last given to the transport, which may need progress to get it out."""
        self.num_handshakes = 0
        self.num_failures = 0

    @property
    def num_ready(self) -> int:
        """Peers that can be read from."""
        return sum(peer.state is PeerState.READY for peer in tuple(self._peers.values()))

    def find(self, engine_id: EngineId) -> Peer | None:
        """The peer, if it is known."""
        return self._peers.get(engine_id)

    def obtain(self, reference: KvReference) -> Peer:
        """The peer of a checked reference; begins a handshake unless one is under way, done, or failed just now."""
        now_s = self._endpoint.clock.now_s()
        peer = self._peers.get(reference.remote_engine_id)
        if peer is not None and not (peer.state is PeerState.FAILED and now_s >= peer.retry_at_s):
            peer.used_at_s = now_s
            return peer
        if peer is not None:
            self._forget(peer)
        return self._begin(reference)

    def tell(self, peer: Peer, message: notifications.Notification) -> None:
        """Send to P, now or as soon as it is READY. Silently dropped when P is dead: its leases then do not matter."""
        if peer.state is PeerState.READY:
            self.told_at_s = self._endpoint.clock.now_s()
            try:
                self._endpoint.backend.notify(peer.engine_id, notifications.encode(message))
            except TransferError:
                self.lost(peer)
        elif peer.state in (PeerState.CONNECTING, PeerState.GREETING):
            peer.outbox.append(message)

    def lost(self, peer: Peer) -> None:
        """P went away: the next reference to it begins anew."""
        if self._peers.get(peer.engine_id) is peer:
            _LOG.warning("kv_transfer.peer_lost", peer=peer.engine_id)
            self._forget(peer)

    def step(self) -> float | None:
        """Advance every peer; seconds until it is worth doing again, None when nothing is under way."""
        self._sweep()
        delays: list[float] = []
        for peer in tuple(self._peers.values()):
            try:
                delay_s = self._advance(peer)
            except TransferError as error:
                self._fail(peer, error)
                continue
            if delay_s is not None:
                delays.append(delay_s)
        if self._leaving or self._guard_reads.num_given_up:
            delays.append(LEAVING_POLL_S)
        return min(delays) if delays else None

    def _begin(self, reference: KvReference) -> Peer:
        endpoint, now_s = self._endpoint, self._endpoint.clock.now_s()
        visit = HandshakeVisit(endpoint.identity, reference.remote_engine_id, endpoint.settings.secret)
        address = PeerAddress(reference.remote_host, reference.remote_port)
        timeout_s = endpoint.settings.handshake_timeout_s
        call = self._client.begin(address, visit, timeout_s)
        peer = Peer(reference.remote_engine_id, address, visit, call, now_s + timeout_s, now_s)
        self._peers[peer.engine_id] = peer
        self.num_handshakes += 1
        call.add_done_callback(lambda _: self._on_answered())
        return peer

    def _advance(self, peer: Peer) -> float | None:
        now_s = self._endpoint.clock.now_s()
        if peer.state is PeerState.CONNECTING and peer.call.done():
            self._connect(peer, peer.call.result())
        if peer.state is PeerState.GREETING and peer.greeting is not None and peer.greeting.read.is_done():
            self._greeted(peer)
        if peer.state in (PeerState.CONNECTING, PeerState.GREETING):
            if now_s >= peer.deadline_s:
                raise HandshakeFailed(f"no handshake with {peer.address.host}:{peer.address.port} in time")
            if peer.state is PeerState.GREETING:
                return GREETING_POLL_S
            return LEAVING_POLL_S if peer.call.done() else peer.deadline_s - now_s
        if now_s - peer.used_at_s >= self._endpoint.settings.peer_ttl_s and not peer.is_read_from:
            self._forget(peer)
        return None

    def _connect(self, peer: Peer, answer: Answer) -> None:
        """The HTTP part is done: load P's memory map and read word 0 of its guard table."""
        backend = self._endpoint.backend
        differing = layout_differences(self._endpoint.layout, answer.layout)
        if differing:
            raise IncompatiblePeer("the KV pools differ in " + ", ".join(differing))
        if not self._guard_reads.has_room or any(other.engine_id == peer.engine_id for other in self._leaving):
            return  # later: a place is needed, and a map that is still read through must not be replaced
        if peer.engine_id in self._added:
            backend.remove_peer(peer.engine_id)
        name = backend.add_peer(answer.metadata)
        self._added.add(peer.engine_id)
        if name != peer.engine_id:
            backend.remove_peer(name)
            raise HandshakeFailed(f"the metadata is of agent {name!r}, not of engine {peer.engine_id!r}")
        peer.answer = answer
        peer.grid = backend.prepare(name, BlockGrid.of_pool(answer.layout))
        words = backend.prepare(name, guard.word_grid(answer.guard_address, answer.guard_slots))
        peer.words = PeerWords(words)
        peer.greeting = self._guard_reads.post(peer.words, 0)
        peer.move_to(PeerState.GREETING)

    def _greeted(self, peer: Peer) -> None:
        if peer.greeting is None:
            return
        word = self._guard_reads.word(peer.greeting)
        self._drop_greeting(peer)
        if word != guard.header(peer.engine_id):
            raise HandshakeFailed("the memory behind the handshake is not this engine's")
        peer.move_to(PeerState.READY)
        _LOG.info("kv_transfer.peer_ready", peer=peer.engine_id, host=peer.address.host, port=peer.address.port)
        for other in tuple(self._peers.values()):
            if other.address == peer.address and other is not peer and not other.is_read_from:
                self._forget(other)
        outbox, peer.outbox = peer.outbox, []
        for message in (notifications.Hello(), *outbox):
            self.tell(peer, message)

    def _fail(self, peer: Peer, error: TransferError) -> None:
        self.num_failures += 1
        settings = self._endpoint.settings
        peer.failure = Failure(failure_cause(error, FailureCause.HANDSHAKE_FAILED), str(error))
        peer.retry_at_s = self._endpoint.clock.now_s() + settings.peer_backoff_s
        peer.outbox.clear()
        peer.call.cancel()
        self._drop_greeting(peer)
        peer.move_to(PeerState.FAILED)
        _LOG.warning(
            "kv_transfer.handshake_failed", peer=peer.engine_id, cause=peer.failure.cause.value, why=str(error)
        )

    def _forget(self, peer: Peer) -> None:
        del self._peers[peer.engine_id]
        self._drop_greeting(peer)
        peer.move_to(PeerState.GONE)
        self._leaving.append(peer)

    def _drop_greeting(self, peer: Peer) -> None:
        if peer.greeting is not None:
            self._guard_reads.let_go(peer.greeting)
            peer.greeting = None

    def _sweep(self) -> None:
        """Give back what belonged to peers that are gone, once nothing reads from them any more."""
        self._guard_reads.sweep()
        for peer in tuple(self._leaving):
            if peer.is_read_from:
                continue
            self._leaving.remove(peer)
            for grid in (peer.grid, peer.words.grid if peer.words else None):
                if grid is not None:
                    grid.release()
            if peer.engine_id not in self._peers and peer.engine_id in self._added:
                self._endpoint.backend.remove_peer(peer.engine_id)
                self._added.discard(peer.engine_id)


def failure_cause(error: TransferError, otherwise: FailureCause) -> FailureCause:
    """Metric label of a transport's or a peer's error."""
    if isinstance(error, IncompatiblePeer):
        return FailureCause.INCOMPATIBLE
    if isinstance(error, ReferenceRefused):
        return FailureCause.REFUSED
    if isinstance(error, PeerDisconnected):
        return FailureCause.DISCONNECTED
    return FailureCause.HANDSHAKE_FAILED if isinstance(error, HandshakeFailed) else otherwise

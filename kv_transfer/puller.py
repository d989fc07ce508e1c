"""Moves one pull through its states: check the lease, read the blocks, check the lease again.

Journey row 7. Owns: posting, polling, time limits and cancellation of reads. Driver thread only.
Does not know: who asked, how peers are connected. A pull whose blocks are being written never ends before the
transport says so, whatever the clock or the caller wants: releasing a NIXL request does not stop bytes in flight.
"""

import numpy as np

from common.errors import Bug, PeerDisconnected, ReferenceRefused, TransferError
from kv_transfer import notifications
from kv_transfer.backends.backend import BlockGrid, Read
from kv_transfer.descriptors import byte_ranges, check_bounds, in_memory_order, whole_blocks
from kv_transfer.endpoint import Endpoint, GuardReads
from kv_transfer.guard import GuardVerdict, verdict
from kv_transfer.handshake import Answer
from kv_transfer.interface import Failure, FailureCause, PullOrder
from kv_transfer.peer import Peer, PeerState
from kv_transfer.peers import PeerBook, failure_cause
from kv_transfer.transfer import ENDED, Pull, PullState

ATTEND_AFTER_S = 0.0005
"""A guard word takes microseconds unless the transport needs P's help; then P is asked to poll often."""

READ_ALONE_S = 0.005
"""How long a read of blocks goes on before it asks, too."""

ATTEND_AGAIN_S = 0.3
"""How often a long read asks again."""


class Puller:
    """Reads for the consumer.

    Args:
        endpoint: D's side.
        peers: whom to read from.
        guard_reads: for guard words.
    """

    def __init__(self, endpoint: Endpoint, peers: PeerBook, guard_reads: GuardReads) -> None:
        self._endpoint, self._peers, self._guard_reads = endpoint, peers, guard_reads
        self._local_grid = endpoint.backend.prepare(None, BlockGrid.of_pool(endpoint.layout))

    def advance(self, pull: Pull) -> None:
        """Go on as far as possible without waiting. Every transport error ends the pull."""
        while True:
            before = pull.state
            try:
                self._step(pull)
            except TransferError as error:
                self._broke(pull, error)
            if pull.state is before or pull.state in ENDED:
                return

    def let_go(self, pull: Pull) -> None:
        """Give the transport back what it kept for a pull that has ended."""
        self._drop_read(pull)
        self._drop_guard_read(pull)

    def _step(self, pull: Pull) -> None:
        if pull.state is not PullState.READING and self._gives_up(pull):
            return
        match pull.state:
            case PullState.QUEUED:
                self._begin(pull)
            case PullState.CHECKING if self._guard_holds(pull):
                self._read(pull)
            case PullState.READING if pull.read is not None:
                if pull.read.is_done():
                    self._arrived(pull)
                else:
                    self._ask_for_help(pull)
            case PullState.CONFIRMING if self._guard_holds(pull):
                pull.move_to(PullState.DONE)

    def _gives_up(self, pull: Pull) -> bool:
        """End a pull that is cancelled or late. Not while READING; a guard word in flight touches no block."""
        if pull.state not in (PullState.QUEUED, PullState.CHECKING, PullState.CONFIRMING):
            return False
        if pull.failure is not None:
            self._end(pull, pull.failure)
        elif pull.is_cancelled:
            pull.move_to(PullState.CANCELLED)
        elif self._endpoint.is_past(pull.deadline_s):
            self._end(pull, Failure(FailureCause.TIMEOUT, "the pull did not end in time"))
        else:
            return False
        return True

    def _begin(self, pull: Pull) -> None:
        peer = self._peers.obtain(pull.reference)
        if peer.failure is not None:
            self._end(pull, peer.failure)
            return
        if peer.state is not PeerState.READY or peer.answer is None or not self._guard_reads.has_room_for_pull:
            return
        check_bounds(peer.answer.layout, pull.reference.remote_block_ids)
        if pull.reference.block_size != peer.answer.layout.block_size:
            raise ReferenceRefused("the reference's block_size is not the peer's")
        if not 0 < pull.slot <= peer.answer.guard_slots:
            raise ReferenceRefused("the lease's slot is outside of the peer's guard table")
        if peer.attends:
            self._attend(pull, peer)
        self._post_guard(pull, peer)
        pull.move_to(PullState.CHECKING)

    def _post_guard(self, pull: Pull, peer: Peer) -> None:
        if peer.words is None:
            raise PeerDisconnected("the peer went away before its guard word was read")
        self._read_alone_for(pull, ATTEND_AFTER_S)
        pull.guard_read = self._guard_reads.post(peer.words, pull.slot)

    def _confirm(self, pull: Pull) -> None:
        """Read the word a second time, by the same request: making one costs as much as using it.

        It goes where the blocks came from, also when the peer was lost and is being met again meanwhile.
        """
        if pull.guard_read is None:
            raise Bug("a pull without a guard word")
        self._read_alone_for(pull, ATTEND_AFTER_S)
        self._guard_reads.post_again(pull.guard_read)
        pull.move_to(PullState.CONFIRMING)

    def _guard_holds(self, pull: Pull) -> bool:
        """Whether the word has come and says HELD; False while it has not come.

        Raises:
            ReferenceRefused: the word is not what the reference claims.
        """
        if pull.guard_read is None:
            return False
        if not pull.guard_read.read.is_done():
            self._ask_for_help(pull)
            return False
        match verdict(self._guard_reads.word(pull.guard_read), pull.generation, pull.digest):
            case GuardVerdict.HELD:
                return True
            case GuardVerdict.ALTERED:
                raise ReferenceRefused("the reference is not what the peer gave out")
            case GuardVerdict.ENDED:
                self._end(pull, Failure(FailureCause.EXPIRED, "the lease has ended: read, released or expired"))
                return False

    def _read(self, pull: Pull) -> None:
        peer = self._peers.find(pull.peer_id)
        if peer is None or peer.state is not PeerState.READY or peer.answer is None or pull.order is None:
            raise PeerDisconnected("the peer went away before the read")
        if pull.order.start_token < pull.order.end_token:
            self._read_alone_for(pull, READ_ALONE_S)
            pull.read = self._post_blocks(pull, pull.order, peer, peer.answer)
            pull.move_to(PullState.READING)
        else:
            self._confirm(pull)

    def _post_blocks(self, pull: Pull, order: PullOrder, peer: Peer, answer: Answer) -> Read:
        local, remote = self._endpoint.layout, answer.layout
        blocks = pull.reference.remote_block_ids
        if local.block_size == remote.block_size and peer.grid is not None:
            remote_ids = whole_blocks(local.block_size, order.start_token, order.end_token, blocks)
            pull.num_bytes, pull.num_descriptors = len(remote_ids) * local.block_bytes, len(remote_ids)
            local_ids, remote_ids = in_memory_order(np.array(order.block_ids, dtype=np.int32), remote_ids)
            return self._endpoint.backend.read_blocks(self._local_grid, local_ids, peer.grid, remote_ids)
        ranges = byte_ranges((local, order.block_ids), (remote, blocks), order.start_token, order.end_token)
        pull.num_bytes, pull.num_descriptors = ranges[0].num_bytes, len(ranges[0])
        return self._endpoint.backend.read_ranges(peer.engine_id, *ranges)

    def _arrived(self, pull: Pull) -> None:
        """Every byte is here and nothing writes any more; now the lease must still stand."""
        if pull.is_cancelled:
            pull.move_to(PullState.CANCELLED)
        elif self._endpoint.is_past(pull.deadline_s):
            self._end(pull, Failure(FailureCause.TIMEOUT, "the blocks arrived too late"))
        else:
            self._confirm(pull)

    def _ask_for_help(self, pull: Pull) -> None:
        """Over a transport that needs P, ask P to poll often; learn it for the peer's next reads."""
        peer = self._peers.find(pull.peer_id)
        if peer is not None and self._endpoint.is_past(pull.attend_at_s):
            peer.attends = True
            self._attend(pull, peer)

    def _read_alone_for(self, pull: Pull, seconds: float) -> None:
        pull.attend_at_s = max(pull.attend_at_s, self._endpoint.clock.now_s() + seconds)

    def _attend(self, pull: Pull, peer: Peer) -> None:
        pull.attend_at_s = self._endpoint.clock.now_s() + ATTEND_AGAIN_S
        self._peers.tell(peer, notifications.Attend(pull.lease_id))

    def _broke(self, pull: Pull, error: TransferError) -> None:
        if isinstance(error, PeerDisconnected):
            peer = self._peers.find(pull.peer_id)
            if peer is not None and peer.state is PeerState.READY:  # otherwise it is being met again already
                self._peers.lost(peer)
            if pull.state in (PullState.QUEUED, PullState.CHECKING) and not pull.has_reconnected:
                # No block was touched: a connection that broke while idle deserves one new handshake.
                pull.has_reconnected = True
                self._drop_guard_read(pull)
                if pull.state is PullState.CHECKING:
                    pull.move_to(PullState.QUEUED)
                return
        if isinstance(error, ReferenceRefused):
            pull.owns_lease = False  # it is not what P gave out, so the lease is not spoilt for the reference that is
        self._end(pull, Failure(failure_cause(error, FailureCause.DISCONNECTED), str(error)))

    def _end(self, pull: Pull, failure: Failure) -> None:
        pull.failure = failure
        pull.move_to(PullState.CANCELLED if pull.is_cancelled else PullState.FAILED)

    def _drop_read(self, pull: Pull) -> None:
        if pull.read is not None:
            pull.read.release()
            pull.read = None

    def _drop_guard_read(self, pull: Pull) -> None:
        if pull.guard_read is not None:
            self._guard_reads.let_go(pull.guard_read)
            pull.guard_read = None

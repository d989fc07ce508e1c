"""A transport inside one process, shipped for tests: real copies between real addresses, with delays and faults.

Owns: a fabric of agents that see each other's registered memory. Reads copy when they complete, never earlier, and
also when nobody asks for them any more: a block that is given away too soon is overwritten, as it would be on a wire.
Does not know: leases, requests.
"""

import ctypes
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from common.clock import Clock
from common.errors import Bug, PeerDisconnected, TransferError
from kv_transfer.backends.backend import BlockGrid, MemoryRegion, Message, PreparedGrid, Read
from kv_transfer.descriptors import RangeList


@dataclass(slots=True)
class Faults:
    """What goes wrong, changed while a test runs.

    Attributes:
        read_delay_s: a read completes this long after it was posted.
        delays_from_bytes: smaller reads are not delayed.
        dead: agents whose reads and notifications fail as disconnected.
        stalled: agents whose reads neither complete nor fail.
        loses_messages: notifications vanish.
    """

    read_delay_s: float = 0.0
    delays_from_bytes: int = 0
    dead: set[str] = field(default_factory=set)
    stalled: set[str] = field(default_factory=set)
    loses_messages: bool = False


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """One posted read, for assertions."""

    reader: str
    peer: str
    num_bytes: int
    num_descriptors: int


class MemoryFabric:
    """The wire between the agents of one test."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.faults = Faults()
        self.reads: list[ReadRecord] = []
        self.agents: dict[str, MemoryBackend] = {}
        self.in_flight: list[_MemoryRead] = []

    def progress(self) -> None:
        """Complete every read whose time has come."""
        for read in tuple(self.in_flight):
            read.land()


class MemoryBackend:
    """One agent on a fabric; the same name again replaces the former one, as a restart would."""

    def __init__(self, name: str, fabric: MemoryFabric) -> None:
        self._name = name
        self._fabric = fabric
        self._regions: list[MemoryRegion] = []
        self._inbox: deque[Message] = deque()
        self._peers: set[str] = set()
        fabric.agents[name] = self

    @property
    def name(self) -> str:
        """The agent's name."""
        return self._name

    def register(self, region: MemoryRegion) -> None:
        """Remember the region; reads outside of regions fail."""
        self._regions.append(region)

    def metadata(self) -> bytes:
        """The name is enough."""
        return self._name.encode()

    def add_peer(self, metadata: bytes) -> str:
        """Always succeeds; a dead peer shows at the first read."""
        peer = metadata.decode()
        self._peers.add(peer)
        return peer

    def remove_peer(self, peer: str) -> None:
        """Forget it.

        Raises:
            Bug: something is being read from it; the library would use the memory map it has just freed.
        """
        if any(read.is_of(self, peer) for read in self._fabric.in_flight):
            raise Bug(f"{peer} is forgotten while it is read from")
        self._peers.discard(peer)

    def prepare(self, peer: str | None, grid: BlockGrid) -> PreparedGrid:
        """Keep the grid."""
        return _MemoryGrid(peer, grid)

    def read_blocks(
        self, local: PreparedGrid, local_ids: NDArray[np.int32], remote: PreparedGrid, remote_ids: NDArray[np.int32]
    ) -> Read:
        """Blocks as ranges."""
        if not isinstance(local, _MemoryGrid) or not isinstance(remote, _MemoryGrid) or remote.peer is None:
            raise TypeError("grids of another backend")
        return self.read_ranges(remote.peer, local.ranges(local_ids), remote.ranges(remote_ids))

    def read_ranges(self, peer: str, local: RangeList, remote: RangeList) -> Read:
        """Post; nothing is copied before the read completes."""
        if not np.array_equal(local.lengths, remote.lengths):
            raise TransferError("local and remote ranges differ in length")
        read = _MemoryRead(self, self._fabric, peer, local, remote)
        read.post_again()
        return read

    def notify(self, peer: str, payload: bytes) -> None:
        """Into the peer's inbox."""
        faults = self._fabric.faults
        if peer in faults.dead or peer not in self._fabric.agents:
            raise PeerDisconnected(f"{peer} is gone")
        if not faults.loses_messages:
            self._fabric.agents[peer]._inbox.append(Message(self._name, payload))  # same class

    def messages(self) -> Sequence[Message]:
        """Empty the inbox; lets reads in flight land."""
        self._fabric.progress()
        messages = list(self._inbox)
        self._inbox.clear()
        return messages

    def close(self) -> None:
        """Leave the fabric."""
        if self._fabric.agents.get(self._name) is self:
            del self._fabric.agents[self._name]

    def knows(self, peer: str) -> bool:
        """Whether the peer was added and not removed."""
        return peer in self._peers

    def holds(self, ranges: RangeList) -> bool:
        """Whether every range lies inside one registered region."""
        return all(
            any(r.address <= start and start + length <= r.address + r.num_bytes for r in self._regions)
            for start, length in zip(ranges.addresses.tolist(), ranges.lengths.tolist(), strict=True)
        )


class _MemoryGrid:
    def __init__(self, peer: str | None, grid: BlockGrid) -> None:
        self.peer = peer
        self._grid = grid

    def ranges(self, block_ids: NDArray[np.int32]) -> RangeList:
        """Where these blocks lie."""
        addresses = self._grid.address + block_ids.astype(np.int64) * self._grid.block_bytes
        lengths = np.full(len(block_ids), self._grid.block_bytes, dtype=np.uint64)
        return RangeList(addresses.astype(np.uint64), lengths, self._grid.device)

    def release(self) -> None:
        """Nothing to free."""


class _MemoryRead:
    def __init__(
        self, reader: MemoryBackend, fabric: MemoryFabric, peer: str, local: RangeList, remote: RangeList
    ) -> None:
        self._reader = reader
        self._fabric = fabric
        self._peer = peer
        self._local, self._remote = local, remote
        self._ready_at_s = 0.0
        self._is_done = False
        self._error: TransferError | None = None

    def post_again(self) -> None:
        """Put it on the wire; it is recorded as a read of its own."""
        if not self._reader.knows(self._peer):
            raise PeerDisconnected(f"{self._peer} is not connected")
        fabric, local = self._fabric, self._local
        is_delayed = local.num_bytes >= fabric.faults.delays_from_bytes
        self._ready_at_s = fabric.clock.now_s() + (fabric.faults.read_delay_s if is_delayed else 0.0)
        self._is_done, self._error = False, None
        fabric.reads.append(ReadRecord(self._reader.name, self._peer, local.num_bytes, len(local)))
        fabric.in_flight.append(self)

    def is_of(self, reader: MemoryBackend, peer: str) -> bool:
        """Whether this reader reads from this peer."""
        return self._reader is reader and self._peer == peer

    def is_done(self) -> bool:
        """Whether it has landed."""
        self.land()
        if self._error is not None:
            raise self._error
        return self._is_done

    def land(self) -> None:
        """Copy or fail if the time has come; once."""
        if self._is_done or self._error is not None:
            return
        owner = self._fabric.agents.get(self._peer)
        if owner is None or self._peer in self._fabric.faults.dead:
            self._error = PeerDisconnected(f"{self._peer} is gone")
        elif self._peer in self._fabric.faults.stalled or self._fabric.clock.now_s() < self._ready_at_s:
            return
        elif not owner.holds(self._remote) or not self._reader.holds(self._local):
            self._error = TransferError("a range lies outside of registered memory")
        else:
            pairs = zip(self._local.addresses, self._remote.addresses, self._local.lengths, strict=True)
            for target, source, length in pairs:
                ctypes.memmove(int(target), int(source), int(length))
            self._is_done = True
        self._fabric.in_flight.remove(self)

    def release(self) -> None:
        """Nothing to free; what is in flight still lands."""

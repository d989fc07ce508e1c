"""The shipped fake behaves like a wire: late copies, dead peers, no access outside of registered memory."""

import numpy as np
import pytest

from common.clock import ManualClock
from common.errors import Bug, PeerDisconnected, TransferError
from kv_transfer.backends.backend import MemoryRegion, Read
from kv_transfer.backends.memory_backend import MemoryBackend, MemoryFabric
from kv_transfer.descriptors import single_range


class Wire:
    """Two agents with 64 bytes each."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.fabric = MemoryFabric(self.clock)
        self.reader, self.owner = MemoryBackend("d", self.fabric), MemoryBackend("p", self.fabric)
        self.target = np.zeros(64, dtype=np.uint8)
        self.source = np.arange(1, 65, dtype=np.uint8)
        for backend, memory in ((self.reader, self.target), (self.owner, self.source)):
            backend.register(MemoryRegion(address=memory.ctypes.data, num_bytes=64, device="cpu"))
        self.reader.add_peer(self.owner.metadata())

    def read(self, offset: int = 0) -> Read:
        local, remote = self.target.ctypes.data, self.source.ctypes.data + offset
        return self.reader.read_ranges("p", single_range(local, 64), single_range(remote, 64))


def test_bytes_land_when_the_read_completes_and_not_before() -> None:
    wire = Wire()
    wire.fabric.faults.read_delay_s = 1.0
    read = wire.read()
    assert not read.is_done()
    assert not wire.target.any()
    wire.clock.advance(1)
    assert read.is_done()
    assert np.array_equal(wire.target, wire.source)


def test_memory_that_is_not_registered_cannot_be_read() -> None:
    wire = Wire()
    read = wire.read(1)
    with pytest.raises(TransferError, match="outside"):
        read.is_done()


def test_a_dead_peer_fails_reads_and_notifications() -> None:
    wire = Wire()
    read = wire.read()
    wire.owner.close()
    with pytest.raises(PeerDisconnected):
        read.is_done()
    with pytest.raises(PeerDisconnected):
        wire.reader.notify("p", b"x")


def test_a_read_that_has_ended_can_be_posted_again_and_brings_what_is_there_now() -> None:
    wire = Wire()
    read = wire.read()
    assert read.is_done()
    wire.source[:] = 7
    read.post_again()
    assert read.is_done()
    assert np.array_equal(wire.target, wire.source)
    assert len(wire.fabric.reads) == 2
    wire.reader.remove_peer("p")
    with pytest.raises(PeerDisconnected):
        read.post_again()


def test_a_peer_must_not_be_forgotten_while_it_is_read_from() -> None:
    wire = Wire()
    wire.fabric.faults.read_delay_s = 1.0
    read = wire.read()
    with pytest.raises(Bug):
        wire.reader.remove_peer("p")
    wire.clock.advance(1)
    assert read.is_done()
    wire.reader.remove_peer("p")


def test_an_unknown_peer_cannot_be_read() -> None:
    wire = Wire()
    wire.reader.remove_peer("p")
    with pytest.raises(PeerDisconnected):
        wire.reader.read_ranges("p", single_range(0, 1), single_range(0, 1))
    wire.reader.add_peer(b"p")
    with pytest.raises(TransferError, match="length"):
        wire.reader.read_ranges("p", single_range(0, 1), single_range(0, 2))

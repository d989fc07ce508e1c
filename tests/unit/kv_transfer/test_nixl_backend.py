"""The NIXL adapter's start: its environment, and what cannot start is one clear error."""

import os

import numpy as np
import pytest
from numpy.typing import NDArray

from common.errors import PeerDisconnected, StartupError, TransferError
from kv_transfer.backends.backend import BlockGrid, MemoryRegion, Read
from kv_transfer.backends.nixl_backend import DEFAULT_ENVIRONMENT, NixlBackend
from kv_transfer.descriptors import single_range


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in DEFAULT_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


def test_the_operators_environment_wins_over_the_defaults_and_config_over_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_LOG_LEVEL", "ERROR")
    monkeypatch.setenv("NIXL_LOG_LEVEL", "DEBUG")
    NixlBackend("env", environment={"NIXL_LOG_LEVEL": "FATAL"}).close()
    assert os.environ["UCX_LOG_LEVEL"] == "ERROR"
    assert os.environ["NIXL_LOG_LEVEL"] == "FATAL"
    assert os.environ["UCX_TLS"] == DEFAULT_ENVIRONMENT["UCX_TLS"]


def test_a_plugin_that_is_not_there_is_named_beside_those_that_are() -> None:
    with pytest.raises(StartupError, match=r"'NOPE'.*UCX"):
        NixlBackend("plugin", plugin="NOPE")


def test_the_librarys_errors_become_ours() -> None:
    backend = NixlBackend("errors")
    memory = np.zeros(64, dtype=np.uint8)
    backend.register(MemoryRegion(address=memory.ctypes.data, num_bytes=64, device="cpu"))
    local = single_range(memory.ctypes.data, 64)
    with pytest.raises(PeerDisconnected):
        backend.read_ranges("nobody", local, local)
    with pytest.raises(TransferError):
        backend.notify("nobody", b"x")
    with pytest.raises(TransferError):
        backend.add_peer(b"not metadata")
    backend.remove_peer("nobody")
    assert backend.messages() == []
    backend.close()


def test_a_read_posted_again_brings_what_is_there_now() -> None:
    reader, owner = NixlBackend("again-d"), NixlBackend("again-p")
    target, source = np.zeros((2, 32), dtype=np.uint8), np.ones((2, 32), dtype=np.uint8)
    for backend, memory in ((reader, target), (owner, source)):
        backend.register(MemoryRegion(address=memory.ctypes.data, num_bytes=memory.nbytes, device="cpu"))
    peer = reader.add_peer(owner.metadata())
    here, there = np.array([0], dtype=np.int32), np.array([1], dtype=np.int32)
    grids = reader.prepare(None, grid_of(target)), reader.prepare(peer, grid_of(source))
    read = reader.read_blocks(grids[0], here, grids[1], there)
    wait(read, owner)
    assert target[0].tolist() == [1] * 32
    source[:] = 2
    read.post_again()
    wait(read, owner)
    assert target.tolist() == [[2] * 32, [0] * 32]
    read.release()
    reader.close()
    owner.close()


def grid_of(memory: NDArray[np.uint8]) -> BlockGrid:
    return BlockGrid(address=memory.ctypes.data, block_bytes=32, num_blocks=len(memory), device="cpu")


def wait(read: Read, owner: NixlBackend) -> None:
    """A first connection needs both sides to make progress."""
    for _ in range(1_000_000):
        if read.is_done():
            return
        owner.messages()
    raise AssertionError("the read does not end")

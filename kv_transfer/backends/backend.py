"""The transport's port: register memory, know peers, read, notify.

Owns: the protocol. Every method is called by the driver thread alone (registration before it starts).
Does not know: why anything is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.wire.kv_layout import KvLayout
from kv_transfer.descriptors import RangeList


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRegion:
    """Bytes of this process. `device` is `cpu` or `cuda`."""

    address: int
    num_bytes: int
    device: str
    device_index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGrid:
    """`num_blocks` equal blocks one after the other."""

    address: int
    block_bytes: int
    num_blocks: int
    device: str
    device_index: int = 0

    @classmethod
    def of_pool(cls, layout: KvLayout) -> "BlockGrid":
        """A KV pool's blocks."""
        return cls(
            address=layout.base_address,
            block_bytes=layout.block_bytes,
            num_blocks=layout.num_blocks,
            device=layout.device,
            device_index=layout.device_index,
        )


@dataclass(frozen=True, slots=True)
class Message:
    """A notification as it came in."""

    sender: str
    payload: bytes


class Read(Protocol):
    """One READ that has been posted."""

    def is_done(self) -> bool:
        """Whether every byte has arrived; drives progress. Nothing writes to the local side after True or an error.

        Raises:
            PeerDisconnected: the peer went away.
            TransferError: the transport failed otherwise.
        """
        ...

    def post_again(self) -> None:
        """Read the same bytes into the same place once more. Only after the end, and while the peer is known.

        Raises:
            PeerDisconnected: the peer went away.
            TransferError: the read could not be posted.
        """
        ...

    def release(self) -> None:
        """Free the transport's resources. Only after the end: releasing does not stop bytes in flight. Idempotent."""
        ...


class PreparedGrid(Protocol):
    """A block grid that the transport has checked and translated once."""

    def release(self) -> None:
        """Forget it. Idempotent."""
        ...


class TransferBackend(Protocol):
    """One agent. Errors are `PeerDisconnected` or another `TransferError`, never the library's own."""

    @property
    def name(self) -> str:
        """The agent's name: the engine id."""
        ...

    def register(self, region: MemoryRegion) -> None:
        """Let peers read and the transport write `region`; the memory outlives the backend."""
        ...

    def metadata(self) -> bytes:
        """What a peer needs to reach this agent and all that is registered so far."""
        ...

    def add_peer(self, metadata: bytes) -> str:
        """Load a peer's metadata and begin connecting; returns its name."""
        ...

    def remove_peer(self, peer: str) -> None:
        """Forget a peer from which nothing is being read. Unknown or dead ones are fine."""
        ...

    def prepare(self, peer: str | None, grid: BlockGrid) -> PreparedGrid:
        """Translate a grid of the peer (or of this process: None) once, for many `read_blocks`."""
        ...

    def read_blocks(
        self, local: PreparedGrid, local_ids: NDArray[np.int32], remote: PreparedGrid, remote_ids: NDArray[np.int32]
    ) -> Read:
        """Post one READ of whole blocks, pairwise; ids `[n] int32`. May do all of the copying before it returns."""
        ...

    def read_ranges(self, peer: str, local: RangeList, remote: RangeList) -> Read:
        """Post one READ of byte ranges, pairwise of equal length."""
        ...

    def notify(self, peer: str, payload: bytes) -> None:
        """Send a message; it may get lost when the peer dies."""
        ...

    def messages(self) -> Sequence[Message]:
        """Messages since the last call; drives progress for both directions."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...

"""Guard words: P's memory that tells a reader, without P's CPU, whether a lease still lives.

    word 0   sha256 of the engine id: proves that the right process is read
    word n   | generation (16) | digest of the reference (16) |   while the lease of slot n is held; zeros otherwise

P writes the word before it gives the reference out and clears it before the blocks may be reused. D reads the word,
then the blocks, then the word again: an unchanged word proves that the blocks were held during the whole read.
Owns: that memory and its meaning. Does not know: leases' times, NIXL.
"""

import hashlib
from collections import deque
from enum import Enum

import numpy as np

from common.errors import QueueFull
from common.ids import EngineId
from kv_transfer.backends.backend import BlockGrid, MemoryRegion
from kv_transfer.reference import GENERATION_BYTES

WORD_BYTES = 32


def word_grid(address: int, num_slots: int) -> BlockGrid:
    """A table of `num_slots` words and the header, as blocks: word n is block n."""
    return BlockGrid(address=address, block_bytes=WORD_BYTES, num_blocks=num_slots + 1, device="cpu")


class GuardVerdict(Enum):
    """What a guard word says about a reference."""

    HELD = "held"
    ENDED = "ended"
    ALTERED = "altered"


def header(engine_id: EngineId) -> bytes:
    """Word 0 of an engine's table."""
    return hashlib.sha256(b"pd-serve guard table 1\0" + engine_id.encode()).digest()


def word(generation: bytes, digest: bytes) -> bytes:
    """The word of a held lease: 32 bytes."""
    return generation + digest[: WORD_BYTES - GENERATION_BYTES]


def verdict(found: bytes, generation: bytes, digest: bytes) -> GuardVerdict:
    """Compare the word read from P with what the reference claims.

    ENDED: this generation is not (or no longer) held. ALTERED: it is held, but for other blocks or another prompt.
    """
    if found == word(generation, digest):
        return GuardVerdict.HELD
    if found[:GENERATION_BYTES] == generation:
        return GuardVerdict.ALTERED
    return GuardVerdict.ENDED


class GuardTable:
    """P's table. Not thread-safe; the lease book's lock covers it. Memory must stay where it is: it is registered."""

    def __init__(self, engine_id: EngineId, num_slots: int) -> None:
        self._words = np.zeros((num_slots + 1, WORD_BYTES), dtype=np.uint8)
        self._words[0] = np.frombuffer(header(engine_id), dtype=np.uint8)
        self._free = deque(range(1, num_slots + 1))

    @property
    def region(self) -> MemoryRegion:
        """The table's memory, to register."""
        return MemoryRegion(address=self._words.ctypes.data, num_bytes=self._words.nbytes, device="cpu")

    @property
    def num_free(self) -> int:
        """Slots without a lease."""
        return len(self._free)

    def take(self) -> int:
        """A free slot; the one unused longest.

        Raises:
            QueueFull: every slot guards a lease.
        """
        if not self._free:
            raise QueueFull("every lease slot is in use")
        return self._free.popleft()

    def write(self, slot: int, generation: bytes, digest: bytes) -> None:
        """Declare the lease held."""
        self._words[slot] = np.frombuffer(word(generation, digest), dtype=np.uint8)

    def clear(self, slot: int) -> None:
        """Declare the lease over and return the slot. Must happen before its blocks may be written again."""
        self._words[slot] = 0
        self._free.append(slot)


class GuardLanding:
    """D's side: where words read from peers arrive, one place per read in flight. Driver thread only."""

    def __init__(self, num_places: int) -> None:
        self._words = np.zeros((num_places, WORD_BYTES), dtype=np.uint8)
        self._free = deque(range(num_places))

    @property
    def region(self) -> MemoryRegion:
        """The memory, to register."""
        return MemoryRegion(address=self._words.ctypes.data, num_bytes=self._words.nbytes, device="cpu")

    @property
    def num_free(self) -> int:
        """Places without a read in flight."""
        return len(self._free)

    def take(self) -> int:
        """A place, wiped. The caller looks at `num_free` first."""
        place = self._free.popleft()
        self.wipe(place)
        return place

    def wipe(self, place: int) -> None:
        """Forget what arrived, before something else may."""
        self._words[place] = 0

    @property
    def grid(self) -> BlockGrid:
        """The places as blocks."""
        return word_grid(int(self._words.ctypes.data), len(self._words) - 1)

    def read(self, place: int) -> bytes:
        """The word that arrived."""
        return bytes(self._words[place])

    def give_back(self, place: int) -> None:
        """Nothing will be written to `place` any more."""
        self._free.append(place)

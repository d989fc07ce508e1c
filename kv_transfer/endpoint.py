"""What every part of D's side works with, and reads of guard words.

Owns: the bundle of collaborators, and the places where guard words land: a place is used again only after the read
into it has ended, also when nobody waits for that read any more.
Does not know: pulls, peers' life.
"""

from dataclasses import dataclass

import numpy as np

from common.clock import Clock
from common.errors import TransferError
from common.wire.kv_layout import KvLayout
from kv_transfer.backends.backend import PreparedGrid, Read, TransferBackend
from kv_transfer.guard import GuardLanding
from kv_transfer.interface import ConsumerSettings, EngineIdentity


@dataclass(frozen=True, slots=True)
class Endpoint:
    """D's agent, pool, name, limits and clock."""

    backend: TransferBackend
    layout: KvLayout
    identity: EngineIdentity
    settings: ConsumerSettings
    clock: Clock

    def is_past(self, at_s: float) -> bool:
        """Whether this moment of the clock has come."""
        return self.clock.now_s() >= at_s


class GuardReads:
    """Posts reads of guard words, and waits for the ones that were given up.

    Args:
        backend: the agent; the landing is registered here.
        num_places: most guard words in flight at a time.
    """

    def __init__(self, backend: TransferBackend, num_places: int) -> None:
        self._backend = backend
        self._landing = GuardLanding(num_places)
        self._given_up: list[GuardRead] = []
        backend.register(self._landing.region)
        self._places = backend.prepare(None, self._landing.grid)

    @property
    def has_room(self) -> bool:
        """Whether another word may be read now."""
        return self._landing.num_free > 0

    @property
    def num_given_up(self) -> int:
        """Reads that nobody waits for and that have not ended."""
        return len(self._given_up)

    def post(self, words: PreparedGrid, slot: int) -> "GuardRead":
        """Read word `slot` of a peer's table. Look at `has_room` first.

        Raises:
            TransferError: the read could not be posted.
        """
        place = self._landing.take()
        try:
            here, there = np.array([place], dtype=np.int32), np.array([slot], dtype=np.int32)
            return GuardRead(place, self._backend.read_blocks(self._places, here, words, there))
        except TransferError:
            self._landing.give_back(place)
            raise

    def take(self, read: "GuardRead") -> bytes:
        """The word of a read that is done; its place is free again."""
        word = self._landing.read(read.place)
        self._free(read)
        return word

    def give_up(self, read: "GuardRead") -> None:
        """Nobody wants the word any more."""
        self._given_up.append(read)
        self.sweep()

    def sweep(self) -> None:
        """Free the places of given-up reads that have ended."""
        for read in tuple(self._given_up):
            if _has_ended(read.read):
                self._given_up.remove(read)
                self._free(read)

    def _free(self, read: "GuardRead") -> None:
        read.read.release()
        self._landing.give_back(read.place)


@dataclass(slots=True, eq=False)
class GuardRead:
    """One guard word on its way to `place`."""

    place: int
    read: Read


def _has_ended(read: Read) -> bool:
    try:
        return read.is_done()
    except TransferError:
        return True

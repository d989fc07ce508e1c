"""What every part of D's side works with, and reads of guard words.

Owns: the bundle of collaborators, and the places where guard words land: a place is used again only after the read
into it has ended, also when nobody waits for that read any more; until then the peer's memory map is needed, too.
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

GREETINGS = 8
"""Peers are met even while as many pulls as may be are under way, and do not get on."""


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


@dataclass(slots=True, eq=False)
class PeerWords:
    """A peer's guard table, prepared for reading, and how many reads of it there are.

    Whoever reads from a peer holds one of them from its first word to its end, so the peer's memory map has to stay
    exactly as long as `num_reads` is above zero.
    """

    grid: PreparedGrid
    num_reads: int = 0


@dataclass(slots=True, eq=False)
class GuardRead:
    """One word of `words`, on its way to `place` or arrived there."""

    words: PeerWords
    place: int
    read: Read


class GuardReads:
    """Posts reads of guard words, and waits for the ones that nobody waits for any more.

    Args:
        backend: the agent; the landing is registered here.
        num_pulls: most pulls that hold a word at a time; there are some more places for greetings.
    """

    def __init__(self, backend: TransferBackend, num_pulls: int) -> None:
        self._backend = backend
        self._landing = GuardLanding(num_pulls + GREETINGS)
        self._given_up: list[GuardRead] = []
        backend.register(self._landing.region)
        self._places = backend.prepare(None, self._landing.grid)

    @property
    def has_room_for_pull(self) -> bool:
        """Whether one more pull may begin, and hold a word until its end."""
        return self._landing.num_free > GREETINGS

    @property
    def has_room(self) -> bool:
        """Whether another word may be read now, and let go of at once."""
        return self._landing.num_free > 0

    @property
    def num_given_up(self) -> int:
        """Reads that nobody waits for and that have not ended."""
        return len(self._given_up)

    def post(self, words: PeerWords, slot: int) -> GuardRead:
        """Read word `slot` of a peer's table. Look at `has_room` first; `let_go` of it in the end.

        Raises:
            TransferError: the read could not be posted.
        """
        place = self._landing.take()
        try:
            here, there = np.array([place], dtype=np.int32), np.array([slot], dtype=np.int32)
            read = self._backend.read_blocks(self._places, here, words.grid, there)
        except TransferError:
            self._landing.give_back(place)
            raise
        words.num_reads += 1
        return GuardRead(words, place, read)

    def post_again(self, read: GuardRead) -> None:
        """Read the same word once more; the one that had arrived is wiped first.

        Raises:
            TransferError: the read could not be posted.
        """
        self._landing.wipe(read.place)
        read.read.post_again()

    def word(self, read: GuardRead) -> bytes:
        """The word of a read that is done."""
        return self._landing.read(read.place)

    def let_go(self, read: GuardRead) -> None:
        """Nobody wants the word any more; its place is free once the read has ended."""
        self._given_up.append(read)
        self.sweep()

    def sweep(self) -> None:
        """Free the places of reads that were let go of and have ended."""
        for read in tuple(self._given_up):
            if _has_ended(read.read):
                self._given_up.remove(read)
                read.read.release()
                read.words.num_reads -= 1
                self._landing.give_back(read.place)


def _has_ended(read: Read) -> bool:
    try:
        return read.is_done()
    except TransferError:
        return True

"""Guard words say whether a lease still lives, and for which reference."""

import ctypes

import pytest

from common.errors import QueueFull
from common.ids import EngineId
from kv_transfer.guard import WORD_BYTES, GuardLanding, GuardTable, GuardVerdict, header, verdict

GENERATION, DIGEST = bytes(range(1, 17)), bytes(range(100, 132))


def word_at(table: GuardTable, slot: int) -> bytes:
    return ctypes.string_at(table.region.address + slot * WORD_BYTES, WORD_BYTES)


def test_word_zero_names_the_engine() -> None:
    table = GuardTable(EngineId("P"), 2)
    assert word_at(table, 0) == header(EngineId("P"))
    assert header(EngineId("P")) != header(EngineId("Q"))


def test_a_held_lease_is_told_from_an_ended_and_from_an_altered_one() -> None:
    table = GuardTable(EngineId("P"), 2)
    slot = table.take()
    table.write(slot, GENERATION, DIGEST)
    assert verdict(word_at(table, slot), GENERATION, DIGEST) is GuardVerdict.HELD
    assert verdict(word_at(table, slot), GENERATION, DIGEST[::-1]) is GuardVerdict.ALTERED
    assert verdict(word_at(table, slot), GENERATION[::-1], DIGEST) is GuardVerdict.ENDED
    table.clear(slot)
    assert verdict(word_at(table, slot), GENERATION, DIGEST) is GuardVerdict.ENDED


def test_a_torn_word_never_reads_as_held() -> None:
    table = GuardTable(EngineId("P"), 1)
    slot = table.take()
    table.write(slot, GENERATION, DIGEST)
    whole = word_at(table, slot)
    for cut in range(WORD_BYTES):
        assert verdict(whole[:cut] + bytes(WORD_BYTES - cut), GENERATION, DIGEST) is not GuardVerdict.HELD


def test_slots_run_out_and_come_back() -> None:
    table = GuardTable(EngineId("P"), 1)
    slot = table.take()
    with pytest.raises(QueueFull):
        table.take()
    table.clear(slot)
    assert table.take() == slot


def test_a_landing_place_is_wiped_before_it_is_used_again() -> None:
    landing = GuardLanding(1)
    place = landing.take()
    ctypes.memset(landing.grid.address + place * WORD_BYTES, 7, WORD_BYTES)
    assert landing.read(place) == bytes([7]) * WORD_BYTES
    landing.give_back(place)
    assert landing.read(landing.take()) == bytes(WORD_BYTES)

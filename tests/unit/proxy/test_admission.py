import asyncio

import pytest

from common.errors import QueueFull
from proxy.admission import Admission
from proxy.config import AdmissionConfig
from tests.support.proxy_rig import until


def admission(**settings: float) -> Admission:
    return Admission(AdmissionConfig(**{"max_concurrent": 1, "max_queued": 2, "queue_timeout_s": 60.0, **settings}))


async def yield_until_waiting(door: Admission, number: int) -> None:
    await until(lambda: door.num_waiting == number)


async def test_slots_are_handed_on_in_the_order_of_arrival() -> None:
    door, order = admission(), []

    async def visit(name: str) -> None:
        async with door.slot():
            order.append(name)

    async with asyncio.TaskGroup() as group:
        await door.acquire()
        for number, name in enumerate("ab", start=1):
            group.create_task(visit(name))
            await yield_until_waiting(door, number)
        door.release()
    assert order == ["a", "b"]
    assert (door.num_running, door.num_waiting) == (0, 0)


async def test_a_full_queue_turns_away_at_once() -> None:
    door = admission(max_queued=0)
    async with door.slot():
        with pytest.raises(QueueFull):
            await door.acquire()
    assert door.num_running == 0


async def test_waiting_too_long_turns_away() -> None:
    door = admission(queue_timeout_s=0.01)
    async with door.slot():
        with pytest.raises(QueueFull):
            await door.acquire()
        assert door.num_waiting == 0
    await door.acquire()
    assert door.num_running == 1


async def test_a_visitor_who_leaves_the_queue_leaves_nothing_behind() -> None:
    door = admission()
    async with asyncio.TaskGroup() as group:
        await door.acquire()
        leaver = group.create_task(door.acquire())
        await yield_until_waiting(door, 1)
        leaver.cancel()
        door.release()
    assert (door.num_running, door.num_waiting) == (0, 0)


async def test_a_slot_handed_to_someone_who_leaves_in_that_moment_goes_back() -> None:
    door = admission()
    async with asyncio.TaskGroup() as group:
        async with door.slot():
            leaver = group.create_task(door.acquire())
            await yield_until_waiting(door, 1)
        leaver.cancel()  # the slot is already its own, but it has not run since
    assert (door.num_running, door.num_waiting) == (0, 0)


async def test_idle_is_reported_when_the_last_slot_comes_back() -> None:
    door = admission()
    await door.acquire()
    async with asyncio.TaskGroup() as group:
        waiter = group.create_task(door.wait_idle())
        await asyncio.sleep(0)
        assert not waiter.done()
        door.release()

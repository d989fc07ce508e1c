import asyncio

import pytest

from common.clock import ManualClock, SystemClock
from proxy.time_limits import TimeLimits
from tests.support.proxy_rig import until


async def wait_under(limits: TimeLimits, seconds: float, owner: object = None) -> None:
    with limits.limit(seconds, owner):
        await asyncio.Event().wait()


async def test_a_block_that_takes_too_long_is_ended() -> None:
    limits = TimeLimits(SystemClock())
    with pytest.raises(TimeoutError):
        await wait_under(limits, 0.0)
    assert limits.num_running == 0


async def test_a_block_in_time_is_left_alone_and_a_renewed_one_too() -> None:
    clock = ManualClock()
    limits = TimeLimits(clock)
    with limits.limit(5) as limit:
        clock.advance(4)
        limit.renew(5)
        clock.advance(4)
        await asyncio.sleep(0.12)  # two looks
    assert limits.num_running == 0


async def test_limits_of_an_owner_run_out_on_demand_and_no_others() -> None:
    limits = TimeLimits(SystemClock())
    async with asyncio.TaskGroup() as group:
        dead, other = object(), object()
        first = group.create_task(failing(limits, dead))
        second = group.create_task(failing(limits, other))
        await until(lambda: limits.num_running == 2)
        limits.expire(dead)
        assert await first
        assert not second.done()
        limits.expire(other)


async def failing(limits: TimeLimits, owner: object) -> bool:
    try:
        await wait_under(limits, 60, owner)
    except TimeoutError:
        return True
    return False


async def test_a_cancellation_from_outside_stays_one_even_if_time_runs_out_as_well() -> None:
    limits = TimeLimits(SystemClock())
    async with asyncio.TaskGroup() as group:
        owner = object()
        task = group.create_task(wait_under(limits, 60, owner))
        await until(lambda: limits.num_running == 1)
        task.cancel()
        limits.expire(owner)
    assert task.cancelled()
    assert limits.num_running == 0


async def test_the_inner_of_two_limits_ends_only_its_own_block() -> None:
    limits = TimeLimits(SystemClock())
    with limits.limit(60):
        with pytest.raises(TimeoutError):
            await wait_under(limits, 0.0)
        await asyncio.sleep(0)
    current = asyncio.current_task()
    assert current is not None
    assert current.cancelling() == 0

import asyncio
import os
import signal

import pytest

from common.tasks import Supervisor, only_cause, wait_for_signal


async def forever() -> None:
    await asyncio.Event().wait()


async def fails() -> None:
    raise ValueError("boom")


async def test_a_failing_task_takes_nobody_with_it() -> None:
    done = asyncio.Event()

    async def works() -> None:
        done.set()

    async with Supervisor() as supervisor:
        failed = supervisor.spawn(fails(), name="fails")
        await failed
        supervisor.spawn(works(), name="works")
        await done.wait()


async def test_leaving_cancels_what_runs_and_lets_finish_what_asked_to() -> None:
    finished, gate = [], asyncio.Event()

    async def release() -> None:
        await gate.wait()
        finished.append(True)

    async with Supervisor() as supervisor:
        endless = supervisor.spawn(forever(), name="forever")
        supervisor.spawn(release(), name="release", finish=True)
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(gate.set)
    assert finished == [True]
    assert endless.cancelled()
    assert supervisor.num_tasks == 0


async def test_the_callers_failure_stays_what_it_is() -> None:
    async def caller() -> None:
        async with Supervisor() as supervisor:
            supervisor.spawn(forever(), name="forever")
            await asyncio.sleep(0)
            raise KeyError("mine")

    with pytest.raises(KeyError):
        await caller()


async def test_a_signal_wakes_the_waiter_and_hangup_does_not() -> None:
    hung_up = asyncio.Event()

    async def send() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        await hung_up.wait()
        os.kill(os.getpid(), signal.SIGTERM)

    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(wait_for_signal(on_hangup=hung_up.set))
        await asyncio.sleep(0)
        group.create_task(send())
    assert waiting.result() is signal.SIGTERM


def test_the_one_cause_of_a_group_is_found_however_deep() -> None:
    cause = ValueError("x")
    assert only_cause(BaseExceptionGroup("a", [BaseExceptionGroup("b", [cause])])) is cause

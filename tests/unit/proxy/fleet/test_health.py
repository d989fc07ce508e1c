import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from common.clock import ManualClock
from common.errors import UpstreamBroken, UpstreamUnreachable
from proxy.config import FleetConfig
from proxy.fleet.health import Monitor
from proxy.fleet.membership import Fleet
from proxy.fleet.worker import Role, Worker, WorkerState
from proxy.upstream import Answer, Upstream


class ScriptedUpstream(Upstream):
    """Answers probes from a list: a status, or an exception; the last entry repeats."""

    def __init__(self, **answers: list[int | Exception | None]) -> None:
        super().__init__(connect_s=1, keepalive_s=1)
        self._answers = {f"/{name}": list(entries) for name, entries in answers.items()}
        self.asked: list[tuple[str, object]] = []

    def script(self, path: str, *answers: int | Exception) -> None:
        """From now on answer like this."""
        self._answers[path] = list(answers)

    async def get(self, worker: Worker, path: str, headers: object) -> Answer:
        self.asked.append((path, headers))
        entries = self._answers.get(path, [200])
        entry = entries.pop(0) if len(entries) > 1 else entries[0]
        if entry is None:
            await asyncio.Event().wait()
        if isinstance(entry, Exception):
            raise entry
        assert isinstance(entry, int)
        return Answer(entry, {}, b'{"data": [{"id": "m"}]}')


def monitored(**answers: list[int | Exception | None]) -> tuple[Monitor, Worker, ScriptedUpstream]:
    config = FleetConfig(prefill=("http://p:1",), probe_timeout_s=0.01, failures_until_dead=2)
    fleet, upstream = Fleet(config, ManualClock()), ScriptedUpstream(**answers)
    return Monitor(fleet, upstream, config, {"Authorization": "Bearer k"}), fleet.all()[0], upstream


async def states(monitor: Monitor, worker: Worker, number: int) -> list[str]:
    seen = []
    for _ in range(number):
        await monitor.probe(worker)
        seen.append(worker.state.value)
    return seen


async def test_an_engine_that_answers_is_ready_and_its_models_are_known() -> None:
    monitor, worker, upstream = monitored()
    assert await states(monitor, worker, 1) == ["ready"]
    assert worker.models == (b'{"id": "m"}',)
    assert all(headers == {"Authorization": "Bearer k"} for _, headers in upstream.asked)


async def test_an_engine_that_is_not_ready_yet_stays_starting() -> None:
    monitor, worker, _ = monitored(ready=[503, UpstreamUnreachable("x"), 200])
    assert await states(monitor, worker, 3) == ["starting", "starting", "ready"]


@pytest.mark.parametrize("failure", [503, UpstreamUnreachable("x")])
async def test_a_refusal_takes_an_engine_out_at_once_and_an_answer_brings_it_back(failure: int | Exception) -> None:
    monitor, worker, _ = monitored(ready=[200, failure, 200])
    assert await states(monitor, worker, 3) == ["ready", "dead", "ready"]


@pytest.mark.parametrize("failure", [None, UpstreamBroken("x")])
async def test_silence_takes_an_engine_out_only_when_it_lasts(failure: Exception | None) -> None:
    monitor, worker, _ = monitored(ready=[200, failure, 200, failure, failure, 200])
    assert await states(monitor, worker, 6) == ["ready", "ready", "ready", "ready", "dead", "ready"]


@pytest.mark.parametrize("missing", [404, 405])
async def test_an_engine_without_ready_is_asked_for_its_health(missing: int) -> None:
    monitor, worker, upstream = monitored(ready=[missing], health=[200, 503])
    assert await states(monitor, worker, 2) == ["ready", "dead"]
    assert ("/health", {"Authorization": "Bearer k"}) in upstream.asked


async def test_a_wrong_key_is_no_readiness() -> None:
    monitor, worker, _ = monitored(ready=[401])
    assert await states(monitor, worker, 1) == ["starting"]


async def test_a_draining_engine_is_left_alone() -> None:
    monitor, worker, _ = monitored(ready=[200, 200, UpstreamUnreachable("x")])
    await monitor.probe(worker)
    worker.move_to(WorkerState.DRAINING)
    assert await states(monitor, worker, 2) == ["draining", "draining"]


async def test_a_circuit_that_opened_before_a_restart_is_closed_by_readiness() -> None:
    monitor, worker, _ = monitored(ready=[200, 503, 200])
    await states(monitor, worker, 2)
    for _ in range(10):
        worker.breaker.on_failure()
    assert await states(monitor, worker, 1) == ["ready"]
    assert worker.is_routable


@asynccontextmanager
async def watched(*, num_legs: int = 0) -> AsyncIterator[tuple[Fleet, ScriptedUpstream]]:
    """A monitor at work on one ready engine: a probe every millisecond, or once a minute while all is calm."""
    config = FleetConfig(prefill=("http://p:1",), probe_interval_s=0.001, calm_probe_interval_s=60)
    fleet, upstream = Fleet(config, ManualClock()), ScriptedUpstream()
    (worker,) = fleet.all()
    for _ in range(num_legs):
        worker.load(1)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(Monitor(fleet, upstream, config, {}).run())
        async with asyncio.timeout(5):
            await until(lambda: worker.state is WorkerState.READY)
            yield fleet, upstream
        running.cancel()


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - watches state that has no event of its own
        await asyncio.sleep(0.001)


async def test_while_all_are_well_and_idle_probes_are_rare() -> None:
    async with watched() as (_, upstream):
        await asyncio.sleep(0.05)  # fifty times the short pause
        assert len([path for path, _ in upstream.asked if path == "/ready"]) <= 2


async def test_an_engine_with_work_is_probed_often() -> None:
    async with watched(num_legs=1) as (_, upstream):
        await until(lambda: len(upstream.asked) > 10)


async def test_a_newcomer_is_probed_at_once() -> None:
    async with watched() as (fleet, _):
        newcomer = fleet.add(Role.DECODE, "http://d:1")
        await until(lambda: newcomer.is_routable)


async def test_an_engine_in_trouble_is_probed_often_until_it_is_out_and_after() -> None:
    async with watched() as (fleet, upstream):
        upstream.script("/ready", UpstreamUnreachable("x"))
        newcomer = fleet.add(Role.DECODE, "http://d:1")  # wakes the monitor: a minute is long
        await until(lambda: all(w.state is not WorkerState.READY for w in fleet.all()))
        upstream.script("/ready", 200)
        await until(lambda: newcomer.is_routable and all(w.is_routable for w in fleet.all()))


async def test_a_good_probe_clears_a_suspicion_that_was_there_when_it_was_sent_and_no_later_one() -> None:
    monitor, worker, _ = monitored()
    await monitor.probe(worker)
    worker.breaker.on_failure()
    await monitor.probe(worker)
    assert not worker.breaker.is_suspect

    class FailsMeanwhile(ScriptedUpstream):
        async def get(self, worker: Worker, path: str, headers: object) -> Answer:
            worker.breaker.on_failure()
            return await super().get(worker, path, headers)

    fleet = Fleet(FleetConfig(prefill=("http://p:1",)), ManualClock())
    (worker,) = fleet.all()
    worker.move_to(WorkerState.READY)
    await Monitor(fleet, FailsMeanwhile(), FleetConfig(), {}).probe(worker)
    assert worker.breaker.is_suspect

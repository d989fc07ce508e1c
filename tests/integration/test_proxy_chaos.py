"""Two P and two D as processes, under load, while every one of them is killed, stopped and restarted in turn."""

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import msgspec
import pytest

from common.clock import SystemClock
from proxy.config import FleetConfig, ProxyConfig, TimeoutConfig
from proxy.fleet.breaker import BreakerState
from proxy.fleet.worker import WorkerState
from proxy.server import RunningProxy, running

COMPLETIONS = "/v1/completions"
NUM_CLIENTS = 8
NUM_CHUNKS = 10
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@dataclass
class Engine:
    """A mock engine in a process of its own, always at the same port."""

    role: str
    port: int
    process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        command = ["-m", "benchmarks.mock_engine", str(self.port), self.role, str(NUM_CHUNKS), "0.01"]
        self.process = await asyncio.create_subprocess_exec(sys.executable, *command)

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def end(self, number: signal.Signals) -> None:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(number)
        await self.process.wait()


@dataclass
class Outcomes:
    whole: int = 0
    told: int = 0
    bad: list[str] = field(default_factory=list)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


QUICK_PROBES = FleetConfig(probe_interval_s=0.1, probe_timeout_s=0.5, failures_until_dead=2)


@asynccontextmanager
async def fleet(config: FleetConfig = QUICK_PROBES) -> AsyncIterator[tuple[RunningProxy, list[Engine]]]:
    engines = [Engine(role, free_port()) for role in "PPDD"]
    try:
        for engine in engines:
            await engine.start()
        urls = {role: tuple(e.url for e in engines if e.role == role) for role in "PD"}
        config = msgspec.structs.replace(config, prefill=urls["P"], decode=urls["D"])
        settings = ProxyConfig(port=0, fleet=config, drain_s=5.0, timeouts=TimeoutConfig(stream_idle_s=3.0))
        async with running(settings, SystemClock()) as proxy:
            await all_in(proxy, WorkerState.READY)
            yield proxy, engines
    finally:
        for engine in engines:
            await engine.end(signal.SIGKILL)


async def all_in(proxy: RunningProxy, state: WorkerState) -> None:
    while not all(worker.state is state for worker in proxy.services.fleet.all()):  # noqa: ASYNC110 - other processes
        await asyncio.sleep(0.02)


async def ask(session: aiohttp.ClientSession, url: str, outcomes: Outcomes, *, is_stream: bool) -> None:
    async with session.post(url, json={"model": "m", "prompt": "x", "stream": is_stream}) as answer:
        body = await answer.read()
    if not is_stream:
        # No byte leaves before the whole answer is there: there is always time to try elsewhere.
        if answer.status == 200 and json.loads(body)["choices"]:
            outcomes.whole += 1
        else:
            outcomes.bad.append(f"{answer.status} {body[-200:]!r}")
        return
    events = [event for event in body.split(b"\n\n") if event]
    if answer.status == 200 and events[-1] == b"data: [DONE]" and len(events) == NUM_CHUNKS + 1:
        outcomes.whole += 1
    elif answer.status == 200 and len(events) > 1 and "error" in json.loads(events[-1].removeprefix(b"data: ")):
        outcomes.told += 1
    else:
        outcomes.bad.append(f"{answer.status} {body[-200:]!r}")


async def load(url: str, stop: asyncio.Event, outcomes: Outcomes, *, is_stream: bool) -> None:
    async with aiohttp.ClientSession() as session:
        while not stop.is_set():
            await ask(session, url, outcomes, is_stream=is_stream)


async def kill_and_restart(proxy: RunningProxy, engine: Engine) -> None:
    await engine.end(signal.SIGKILL)
    await asyncio.sleep(0.3)
    await engine.start()


async def stop_and_continue(proxy: RunningProxy, engine: Engine) -> None:
    engine.send(signal.SIGSTOP)
    (worker,) = [w for w in proxy.services.fleet.all() if w.url == engine.url]
    while worker.state is not WorkerState.DEAD:  # noqa: ASYNC110 - another process
        await asyncio.sleep(0.02)
    engine.send(signal.SIGCONT)


async def restart_politely(proxy: RunningProxy, engine: Engine) -> None:
    await engine.end(signal.SIGTERM)
    await engine.start()


@pytest.mark.parametrize("fault", [kill_and_restart, stop_and_continue, restart_politely])
async def test_no_request_fails_before_its_first_byte_and_the_rest_are_told(fault) -> None:
    outcomes, stop = Outcomes(), asyncio.Event()
    async with fleet() as (proxy, engines), asyncio.TaskGroup() as group:
        url = f"http://127.0.0.1:{proxy.port}{COMPLETIONS}"
        for number in range(NUM_CLIENTS):
            group.create_task(load(url, stop, outcomes, is_stream=number % 2 == 0))
        for engine in engines:
            await asyncio.sleep(0.3)
            await fault(proxy, engine)
            await all_in(proxy, WorkerState.READY)
        stop.set()
    assert outcomes.bad == []
    assert outcomes.whole > 50
    for worker in proxy.services.fleet.all():
        assert (worker.num_legs, worker.outstanding_bytes) == (0, 0)


FREEZE_S, LEAVES_WITHIN_S, RETURNS_WITHIN_S = 60.0, 10.0, 10.0


async def ask_nonsense(url: str, stop: asyncio.Event, outcomes: Outcomes) -> None:
    """What engines refuse, again and again."""
    async with aiohttp.ClientSession() as session:
        while not stop.is_set():
            async with session.post(url, json={"model": "m", "prompt": "x", "temperature": -5}) as answer:
                if answer.status != 400:
                    outcomes.bad.append(f"{answer.status} for nonsense")
            await asyncio.sleep(0.05)


async def comes_true(holds: Callable[[], bool], within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110 - other processes
            await asyncio.sleep(0.001)


@pytest.mark.long
async def test_a_p_frozen_for_a_minute_leaves_within_seconds_returns_by_itself_and_refusals_harm_nobody() -> None:
    outcomes, stop, loop = Outcomes(), asyncio.Event(), asyncio.get_running_loop()
    async with fleet(FleetConfig()) as (proxy, engines), asyncio.TaskGroup() as group:
        url = f"http://127.0.0.1:{proxy.port}{COMPLETIONS}"
        for number in range(NUM_CLIENTS):
            group.create_task(load(url, stop, outcomes, is_stream=number % 2 == 0))
        group.create_task(ask_nonsense(url, stop, outcomes))
        (worker,) = [w for w in proxy.services.fleet.all() if w.url == engines[0].url]
        others = [w for w in proxy.services.fleet.all() if w is not worker]
        await comes_true(lambda: worker.num_legs > 0, RETURNS_WITHIN_S)  # one that will have to be given up
        engines[0].send(signal.SIGSTOP)
        frozen_s = loop.time()
        await comes_true(lambda: worker.state is WorkerState.DEAD, LEAVES_WITHIN_S)
        served = outcomes.whole
        while loop.time() - frozen_s < FREEZE_S:
            await asyncio.sleep(0.1)
            assert (worker.state, worker.num_legs) == (WorkerState.DEAD, 0)
            assert all(w.is_routable and w.breaker.status is BreakerState.CLOSED for w in others)
        assert outcomes.whole > served + 1000
        engines[0].send(signal.SIGCONT)
        await comes_true(lambda: worker.num_legs > 0, RETURNS_WITHIN_S)
        stop.set()
    assert outcomes.bad == []
    # Each leg that the frozen engine held was sent to the other one, once.
    retries = [(labels[0], count) for labels, count in proxy.services.metrics.retries.counts()]
    assert {leg for leg, _ in retries} == {"prefill"}
    assert 1 <= sum(count for _, count in retries) <= NUM_CLIENTS + 1
    assert outcomes.told == 0

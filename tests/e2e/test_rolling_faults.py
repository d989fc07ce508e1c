"""Two real P and two real D under load, while each is killed, frozen and restarted in turn.

Mock engines go through the same in `tests/integration/test_proxy_chaos.py`, faster; here KV and grammars are real.
"""

import asyncio
import json
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from benchmarks.chaos.fleet import Fleet, running_fleet
from tests.support.trio import ENGINE, ROOT

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(1200)]

PROMPTS = [f"Write {number} words about the sea, slowly and in order:" for number in range(4)]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "r", "schema": SCHEMA}}
STARTS_WITHIN_S, LEAVES_WITHIN_S = 120, 30


@dataclass
class Outcomes:
    whole: int = 0
    told: int = 0
    bad: list[str] = field(default_factory=list)


def bodies() -> list[dict[str, Any]]:
    """Streamed and not, free and under a schema."""
    base = {"model": "smollm2", "max_tokens": 16, "temperature": 0}
    return [
        {**base, "prompt": prompt, "stream": number % 2 == 0, **({"response_format": FORMAT} if number > 1 else {})}
        for number, prompt in enumerate(PROMPTS)
    ]


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[int, str, bool]:
    """Status, text (or body), and whether an error event ended the stream."""
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        raw = (await answer.read()).decode()
        if answer.status != 200:
            return answer.status, raw, False
    if not body["stream"]:
        return 200, json.loads(raw)["choices"][0]["text"], False
    events = [event.removeprefix("data: ") for event in raw.split("\n\n") if event]
    if events[-1] != "[DONE]":
        return 200, raw, "error" in json.loads(events[-1])
    return 200, "".join(choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"]), False


async def load(url: str, body: dict[str, Any], expected: str, stop: asyncio.Event, outcomes: Outcomes) -> None:
    async with aiohttp.ClientSession() as session:
        while not stop.is_set():
            status, text, was_told = await ask(session, url, body)
            if status == 200 and text == expected:
                outcomes.whole += 1
            elif was_told and body["stream"]:
                outcomes.told += 1
            else:
                outcomes.bad.append(f"{status} {text[-300:]!r}")


async def kill_and_restart(fleet: Fleet, name: str) -> None:
    fleet.signal(name, signal.SIGKILL)
    await routable(fleet, name, 1)
    fleet.start(name)


async def stop_and_continue(fleet: Fleet, name: str) -> None:
    fleet.signal(name, signal.SIGSTOP)
    await routable(fleet, name, 1)
    fleet.signal(name, signal.SIGCONT)


async def restart_politely(fleet: Fleet, name: str) -> None:
    process = fleet.processes.pop(name)
    process.send_signal(signal.SIGTERM)
    await asyncio.to_thread(process.wait, 60)
    fleet.start(name)


async def routable(fleet: Fleet, name: str, number: int) -> None:
    """Wait until the proxy would send legs to `number` engines of the role of `name`."""
    metric = f"pd_proxy_{name.rstrip('0123456789')}_engines_routable"
    async with asyncio.timeout(STARTS_WITHIN_S if number == 2 else LEAVES_WITHIN_S):
        while await asyncio.to_thread(fleet.total, "proxy", metric) != number:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.2)


FAULTS: list[Callable[[Fleet, str], Awaitable[None]]] = [kill_and_restart, stop_and_continue, restart_politely]


async def test_no_request_fails_before_its_first_byte_and_what_is_answered_is_right() -> None:
    with running_fleet(ROOT / "configs" / "pd.yaml", ENGINE, 2, 2) as fleet:
        url, outcomes, stop = fleet.url("proxy"), Outcomes(), asyncio.Event()
        for name in fleet.engines:
            await routable(fleet, name, 2)
        async with aiohttp.ClientSession() as session:
            expected = [(await ask(session, url, body))[1] for body in bodies()]
        async with asyncio.TaskGroup() as group:
            for body, text in zip(bodies(), expected, strict=True):
                group.create_task(load(url, body, text, stop, outcomes))
            for fault in FAULTS:
                for name in fleet.engines:
                    await asyncio.sleep(0.5)
                    await fault(fleet, name)
                    await routable(fleet, name, 2)
            stop.set()
        assert outcomes.bad == []
        assert outcomes.whole > 50
        assert await asyncio.to_thread(fleet.total, "proxy", "pd_requests_running") == 0

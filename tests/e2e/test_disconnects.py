"""Clients that leave at random points cost nothing that lasts: blocks, leases, slots, tasks are back at their start."""

import asyncio
import random
import time
from typing import Any

import aiohttp
import pytest

from tests.support.trio import ROLES, Trio

pytestmark = pytest.mark.slow

CLIENTS = 16
REQUESTS = 300
GAUGES = {
    "proxy": ("pd_proxy_slots_in_use", "pd_requests_running", "pd_tasks"),
    "prefill": ("pd_kv_blocks_in_use", "pd_leases_held", "pd_requests_running", "pd_requests_waiting"),
    "decode": ("pd_kv_blocks_in_use", "pd_requests_running", "pd_requests_waiting"),
}


def held(trio: Trio) -> dict[str, float]:
    return {f"{role}.{name}": trio.total(role, name) for role in ROLES for name in GAUGES[role]}


def settled(trio: Trio, wanted: dict[str, float], within_s: float = 40.0) -> dict[str, float]:
    """What is held once it equals `wanted`, or at the end of the time: another process' gauges can only be polled."""
    give_up_at = time.monotonic() + within_s
    while (now := held(trio)) != wanted and time.monotonic() < give_up_at:
        time.sleep(0.2)
    return now


def body_of(chance: random.Random) -> dict[str, Any]:
    words = " ".join(chance.choices(["sun", "river", "stone", "cloud", "seven", "lantern"], k=chance.randint(1, 120)))
    body: dict[str, Any] = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": words}],
        "max_tokens": chance.randint(1, 12),
        "stream": chance.random() < 0.5,
    }
    if chance.random() < 0.3:
        body["structured_outputs"] = {"choice": ["yes", "no", f"perhaps {chance.randint(0, 5)}"]}
    return body


async def ask(session: aiohttp.ClientSession, url: str, chance: random.Random, leaves: bool) -> str:
    patience_s = chance.uniform(0.0, 0.6) if leaves else 120.0
    try:
        async with asyncio.timeout(patience_s), session.post(url, json=body_of(chance)) as response:
            await response.read()
            return "answered" if response.status == 200 else f"status {response.status}"
    except TimeoutError:
        return "left" if leaves else "timed out"


@pytest.mark.timeout(600)
async def test_nothing_leaks_when_half_the_clients_leave_at_random(trio: Trio) -> None:
    before = held(trio)
    url = trio.url("proxy") + "/v1/chat/completions"
    outcomes: list[str] = []

    async def client(number: int) -> None:
        chance = random.Random(number)
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            leaves = number % 2 == 0
            outcomes.extend([await ask(session, url, chance, leaves) for _ in range(number, REQUESTS, CLIENTS)])

    async with asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(client(number))
    assert len(outcomes) == REQUESTS
    assert set(outcomes) <= {"answered", "left"}, set(outcomes)
    assert outcomes.count("left") > REQUESTS // 10

    assert await asyncio.to_thread(settled, trio, before) == before

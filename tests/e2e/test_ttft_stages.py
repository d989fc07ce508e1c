"""The stages of a request add up to the TTFT its client saw."""

import asyncio
import json
import statistics
import time
from typing import Any

import aiohttp
import pytest

from tests.support.trio import Trio

pytestmark = pytest.mark.slow

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
PROMPT = "Write one sentence about the sea. " * 12
KINDS: dict[str, dict[str, Any]] = {
    "free": {},
    "json": {"response_format": {"type": "json_schema", "json_schema": {"name": "r", "schema": SCHEMA}}},
}


async def measure(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[float, dict[str, float]]:
    """TTFT in ms as a client sees it (first byte of the body), and the stages in ms that the answer reports."""
    sent = time.perf_counter()
    async with session.post(url + "/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        first = await response.content.readany()
        ttft_ms = (time.perf_counter() - sent) * 1000
        text = (first + await response.content.read()).decode()
    chunks = [
        json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ") and line != "data: [DONE]"
    ]
    timelines = [chunk["timeline"] for chunk in chunks if "timeline" in chunk]
    assert len(timelines) == 1
    return ttft_ms, timelines[0]["stages_ms"]


async def empty_round_trip_ms(session: aiohttp.ClientSession, url: str) -> float:
    """What lies outside the proxy's sight: a client and a proxy that wake up for a request that does nothing."""
    await asyncio.sleep(0.3)  # both have rested as long as they do while the engines work
    sent = time.perf_counter()
    async with session.get(url + "/health") as response:
        await response.read()
    return (time.perf_counter() - sent) * 1000


@pytest.mark.parametrize("kind", sorted(KINDS))
async def test_stages_add_up_to_the_client_s_ttft(trio: Trio, kind: str) -> None:
    differences: list[float] = []
    async with aiohttp.ClientSession() as session:
        for attempt in range(9):
            messages = [{"role": "user", "content": f"{attempt} {PROMPT}"}]
            body = {"model": "smollm2", "messages": messages, "max_tokens": 4, "stream": True, "timeline": True}
            ttft_ms, stages = await measure(session, trio.url("proxy"), {**body, **KINDS[kind]})
            assert {"front", "queue_p", "prefill", "handoff", "queue_d", "pull", "first", "return"} <= set(stages)
            assert all(duration >= 0 for duration in stages.values())
            differences.append(ttft_ms - sum(stages.values()) - max(2.0, 0.02 * ttft_ms))
            assert ttft_ms > sum(stages.values()) - 2.0
        outside_ms = [await empty_round_trip_ms(session, trio.url("proxy")) for _ in range(5)]
    # 2 ms or 2 %; more only where an empty request takes more than 2 ms, which no server sees (quiet: 1 ms).
    slow_ms = max(0.0, statistics.median(outside_ms) - 2.0)
    assert statistics.median(differences) <= slow_ms, (differences, outside_ms)

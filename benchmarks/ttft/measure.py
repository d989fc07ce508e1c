"""One request as a client sees it: time to the first content byte, and the stages the server reports.

Owns: the HTTP client of the benchmark. `Server-Timing` gives the stages where the server sends it (ours does).
"""

import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from common.wire import timing


@dataclass(frozen=True, slots=True)
class Sample:
    """One answered request. Milliseconds; `stages_ms` is empty for servers that report none."""

    ttft_ms: float
    total_ms: float
    stages_ms: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that was answered with an error (status 200: one that came in the stream), or not at all (status 0)."""

    status: int
    message: str


async def measure(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Sample | Refusal:
    """Send a streamed chat request; TTFT is the first `data:` event that carries content or a finish reason."""
    try:
        return await _measure(session, url, body)
    except (aiohttp.ClientError, TimeoutError) as error:
        return Refusal(0, repr(error))


async def _measure(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Sample | Refusal:
    sent = time.perf_counter()
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        if response.status != 200:
            return Refusal(response.status, (await response.text())[:300])
        ttft_ms = None
        seen = b""
        async for part in response.content.iter_any():
            if ttft_ms is None:
                seen += part
                if _has_content(seen):
                    ttft_ms = (time.perf_counter() - sent) * 1000
        total_ms = (time.perf_counter() - sent) * 1000
        stages = {name: seconds * 1000 for name, seconds in timing.decode(response.headers.get(timing.HEADER)).items()}
    if ttft_ms is None:
        return Refusal(200, seen.decode(errors="replace")[:300])
    return Sample(ttft_ms, total_ms, stages)


def _has_content(events: bytes) -> bool:
    """Whether an event beyond the opening role delta has arrived."""
    for line in events.split(b"\n"):
        empty = b'"content":""' in line or b'"content": ""' in line
        ended = b'"finish_reason":"' in line or b'"finish_reason": "' in line
        if line.startswith(b"data:") and ((b'"content"' in line and not empty) or ended):
            return True
    return False

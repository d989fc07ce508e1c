"""A streamed completion as a client sees it: when each event arrived.

Owns: the request and its times. Prompts are random words, new each time, so no prefix cache helps.
"""

import asyncio
import random
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from benchmarks.prompts import random_words

SCHEMA = {"type": "object", "properties": {"text": {"type": "string", "minLength": 4000}}, "required": ["text"]}


@dataclass(frozen=True, slots=True)
class Stream:
    """Arrival times of one answer's tokens in seconds since it was sent; `num_tokens` as the server counts them."""

    ttft_s: float
    total_s: float
    num_tokens: int

    @property
    def tpot_s(self) -> float:
        """Seconds per output token after the first."""
        return (self.total_s - self.ttft_s) / max(1, self.num_tokens - 1)


def body_of(
    model: str, num_prompt_words: int, max_tokens: int, structured: bool, chance: random.Random
) -> dict[str, Any]:
    """A greedy completion of exactly `max_tokens` tokens; a structured one stays inside one long JSON string."""
    prompt = f"{chance.getrandbits(40)} " + random_words(num_prompt_words, chance)
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    body["stream_options"] = {"include_usage": True}
    if structured:
        return {**body, "structured_outputs": {"json": SCHEMA}}
    return {**body, "ignore_eos": True}


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Stream:
    """Send and read to the end. Raises: RuntimeError on any status but 200."""
    sent = time.perf_counter()
    ttft_s, num_tokens = None, 0
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{url} answered {response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if line.startswith(b"data:") and ttft_s is None and b'"text"' in line:
                ttft_s = time.perf_counter() - sent
            if b'"completion_tokens"' in line:
                num_tokens = int(line.split(b'"completion_tokens"')[1].lstrip(b": ").split(b",")[0].split(b"}")[0])
    total_s = time.perf_counter() - sent
    return Stream(ttft_s if ttft_s is not None else total_s, total_s, num_tokens)


async def ask_many(session: aiohttp.ClientSession, url: str, bodies: list[dict[str, Any]]) -> list[Stream]:
    """All at once."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(session, url, body)) for body in bodies]
    return [task.result() for task in tasks]

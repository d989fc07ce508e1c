"""A batch of streams decoded together, and the gaps between the tokens of the free ones.

    stream 1   P--x--x--x--x--x--x--x
    stream 2      P-----x--x--x--x--x--x--x
                        |<- window ->|         every stream has its first token, none its last: one batch size

Owns: requests, arrival times, the window. Does not know: what is compared.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from typing import Any

import aiohttp

from benchmarks.prompts import random_words

SLOW_SCHEMA = {
    "type": "object",
    "properties": {"content": {"type": "string", "maxLength": 100_000}},
    "required": ["content"],
    "additionalProperties": False,
}
NEVER_CLOSED = ('"', '"}', '",', '"]', '".', '"),', '");', '">', '"?', '":', '")', "\"'", '";', '"""', '".\n', '""')
"""What could end the string of `SLOW_SCHEMA`; forbidden, so that it goes on for as long as the free streams."""


def body_of(model: str, num_tokens: int, chance: random.Random, more: dict[str, Any]) -> dict[str, Any]:
    """A stream of `num_tokens` tokens with `more` body fields."""
    return {
        "model": model,
        "prompt": f"{chance.getrandbits(40)} {random_words(16, chance)}",
        "max_tokens": num_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": "structured_outputs" not in more,
        **more,
    }


async def gaps_of(
    session: aiohttp.ClientSession, url: str, free: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]
) -> list[float]:
    """Seconds between two tokens of the `free` streams, while all of `free` and `others` are being decoded.

    Raises: RuntimeError on any status but 200.
    """
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_arrivals(session, url, body)) for body in [*free, *others]]
    return gaps_in_window([task.result() for task in tasks], len(free))


def gaps_in_window(arrivals: Sequence[Sequence[float]], num_measured: int) -> list[float]:
    """Gaps of the first `num_measured` streams between the last stream's first token and the first stream's last."""
    start_s, end_s = max(times[0] for times in arrivals), min(times[-1] for times in arrivals)
    return [
        after - before
        for times in arrivals[:num_measured]
        for before, after in itertools.pairwise(times)
        if before >= start_s and after <= end_s
    ]


async def _arrivals(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> list[float]:
    """When each token came."""
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{url} answered {response.status}: {(await response.text())[:300]}")
        times = [
            time.perf_counter() async for line in response.content if line.startswith(b"data:") and b'"text"' in line
        ]
    if len(times) < 2:
        raise RuntimeError(f"a stream of {len(times)} tokens has no gaps")
    return times


async def never_closed_bias(session: aiohttp.ClientSession, url: str, model: str) -> dict[str, float]:
    """`logit_bias` that forbids the tokens of `NEVER_CLOSED`."""
    bias = {}
    for piece in NEVER_CLOSED:
        body = {"model": model, "prompt": piece, "add_special_tokens": False}
        async with session.post(f"{url}/tokenize", json=body) as response:
            tokens = (await response.json())["tokens"]
        if len(tokens) == 1:
            bias[str(tokens[0])] = -100.0
    return bias

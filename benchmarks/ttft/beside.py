"""Other people's streams: long free answers that keep the engines busy while something is measured beside them.

Owns: keeping a number of them open. Does not know: what is measured.
"""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp

from benchmarks.prompts import random_words

_NUM_WORDS = 30
_NUM_TOKENS = 200


class StreamFailed(Exception):
    """A stream beside the measurement was not answered: what was measured is not what was asked for."""


@asynccontextmanager
async def streams_beside(
    session: aiohttp.ClientSession, urls: Sequence[str], num_streams: int, model: str, chance: random.Random
) -> AsyncIterator[None]:
    """Keep `num_streams` free streams running inside the block, spread over `urls`; one that ends begins anew.

    Each has a prompt of its own and `_NUM_TOKENS` tokens.

    Leaving it raises:
        ExceptionGroup: with `StreamFailed` or the connection's error, as soon as one of them fails.
    """
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_keep_asking(session, url, model, chance))
            for url in itertools.islice(itertools.cycle(urls), num_streams)
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


async def _keep_asking(session: aiohttp.ClientSession, url: str, model: str, chance: random.Random) -> None:
    while True:
        body = {
            "model": model,
            "prompt": f"{chance.getrandbits(40)} {random_words(_NUM_WORDS, chance)}",
            "max_tokens": _NUM_TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise StreamFailed(f"{url} answered {response.status}: {(await response.text())[:300]}")
            async for _ in response.content.iter_any():
                pass

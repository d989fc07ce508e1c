import asyncio
import json
import random

import aiohttp
import pytest

from benchmarks.ttft.beside import StreamFailed, streams_beside
from tests.support import mock_engine as mock
from tests.support.proxy_rig import until

COMPLETIONS = "/v1/completions"


async def test_as_many_streams_as_asked_for_run_until_the_block_ends_and_one_that_ends_begins_anew() -> None:
    async with mock.serving(mock.MockEngine("D")) as engine, aiohttp.ClientSession() as session:
        engine.script(COMPLETIONS, mock.hangs, mock.hangs)  # the third ends at once, and its followers
        async with streams_beside(session, [engine.url], 3, "m", random.Random(0)):
            await until(lambda: len(engine.calls()) > 6)
            assert engine.num_cancelled == 0
        await until(lambda: engine.num_cancelled >= 2)
        prompts = {json.loads(call.raw)["prompt"] for call in engine.calls()}
        assert len(prompts) == len(engine.calls())  # nothing is answered from a prefix cache


async def test_a_stream_that_fails_ends_the_measurement() -> None:
    async with mock.serving(mock.MockEngine("D")) as engine, aiohttp.ClientSession() as session:
        engine.always[COMPLETIONS] = mock.answers(503)
        with pytest.RaisesGroup(StreamFailed):
            async with streams_beside(session, [engine.url], 1, "m", random.Random(0)):
                await asyncio.Event().wait()

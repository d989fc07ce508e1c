"""A proxy in front of mock engines, all in this process, over real sockets on free ports."""

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from common.clock import SystemClock
from proxy.config import FleetConfig, ProxyConfig
from proxy.server import RunningProxy, running
from proxy.services import Services
from tests.support.mock_engine import MockEngine, serving

FAST_PROBES = {"probe_interval_s": 0.02, "calm_probe_interval_s": 0.02, "probe_timeout_s": 0.5}


@dataclass
class Rig:
    proxy: RunningProxy
    p: MockEngine
    d: MockEngine
    prefill: list[MockEngine]
    decode: list[MockEngine]
    session: aiohttp.ClientSession

    @property
    def services(self) -> Services:
        return self.proxy.services

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.proxy.port}"

    async def post(
        self, body: Any, path: str = "/v1/completions", headers: dict[str, str] | None = None
    ) -> tuple[int, Mapping[str, str], bytes]:
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        async with self.session.post(self.url + path, data=io.BytesIO(data), headers=headers) as answer:
            return answer.status, answer.headers, await answer.read()

    async def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, Mapping[str, str], bytes]:
        async with self.session.get(self.url + path, headers=headers) as answer:
            return answer.status, answer.headers, await answer.read()

    def assert_nothing_is_held(self) -> None:
        assert self.services.admission.num_running == 0
        assert self.services.admission.num_waiting == 0
        for worker in self.services.fleet.all():
            assert (worker.num_legs, worker.outstanding_bytes) == (0, 0)


@asynccontextmanager
async def rig(
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    fleet: dict[str, Any] | None = None,
    wait: bool = True,
    api_key: str | None = None,
    **settings: Any,
) -> AsyncIterator[Rig]:
    """A started rig; `settings` are keys of `proxy:` as in the file."""
    async with AsyncExitStack() as stack:
        prefill = [await stack.enter_async_context(serving(MockEngine("P"))) for _ in range(num_prefill)]
        decode = [await stack.enter_async_context(serving(MockEngine("D"))) for _ in range(num_decode)]
        for engine in (*prefill, *decode):
            engine.api_key = api_key
            engine.is_ready = wait
        urls = {"prefill": [e.url for e in prefill], "decode": [e.url for e in decode]}
        fleet_config = msgspec.convert({**urls, **FAST_PROBES, **(fleet or {})}, FleetConfig)
        config = msgspec.convert({"port": 0, "drain_s": 1.0, **settings}, ProxyConfig)
        config = msgspec.structs.replace(config, fleet=fleet_config)
        session = await stack.enter_async_context(aiohttp.ClientSession(auto_decompress=False))
        proxy = await stack.enter_async_context(running(config, SystemClock()))
        if wait:
            await proxy.services.fleet.wait_ready()
            await until(lambda: all(worker.is_routable for worker in proxy.services.fleet.all()))
        yield Rig(proxy, prefill[0], decode[0], prefill, decode, session)


async def until(holds: Callable[[], bool]) -> None:
    """Give way to everything else in this process until `holds`; the test's own time limit ends a vain wait."""
    while not holds():  # noqa: ASYNC110 - watches state that has no event of its own
        await asyncio.sleep(0)

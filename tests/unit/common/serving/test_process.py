import asyncio
import os
import signal
import socket
import threading
from dataclasses import dataclass, field

import aiohttp
import pytest

from common.errors import EngineError, StartupError
from common.serving.process import ProcessSettings, serve_until_signal
from common.serving.surface import Parts
from common.telemetry.metrics import Metrics
from tests.support.serving_rig import Scripted, scripted
from tests.support.trio import free_port


@dataclass
class FakeRunning:
    made: Scripted
    has_started: bool = False
    num_closed: int = 0

    @property
    def parts(self) -> Parts:
        return self.made.parts

    async def start(self) -> None:
        self.has_started = True

    async def close(self) -> None:
        self.num_closed += 1


@dataclass
class FakeRole:
    port: int = field(default_factory=free_port)
    made: Scripted = field(default_factory=scripted)
    fails: Exception | None = None
    may_load: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.running = FakeRunning(self.made)
        self.may_load.set()

    @property
    def process(self) -> ProcessSettings:
        return ProcessSettings(
            role="decode",
            host="127.0.0.1",
            port=self.port,
            max_body_bytes=1 << 20,
            api_key=None,
            drain_s=10.0,
            log_json=False,
            log_level="info",
        )

    def load(self, engine_id: str, port: int, metrics: Metrics) -> FakeRunning:
        assert port == self.port
        self.may_load.wait(10)
        if self.fails is not None:
            raise self.fails
        return self.running


async def status(session: aiohttp.ClientSession, role: FakeRole, path: str) -> int:
    try:
        async with session.get(f"http://127.0.0.1:{role.port}{path}") as response:
            return response.status
    except aiohttp.ClientConnectorError:
        return 0


async def until(session: aiohttp.ClientSession, role: FakeRole, path: str, wanted: int) -> None:
    async with asyncio.timeout(20):
        while await status(session, role, path) != wanted:  # noqa: ASYNC110 - only an HTTP answer can tell
            await asyncio.sleep(0)


async def test_health_answers_while_the_model_loads_and_ready_says_when_it_has():
    role = FakeRole()
    role.may_load.clear()
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        serving = group.create_task(serve_until_signal(role))
        await until(session, role, "/health", 200)
        assert await status(session, role, "/ready") == 503
        role.may_load.set()
        await until(session, role, "/ready", 200)
        os.kill(os.getpid(), signal.SIGTERM)
        await serving
        assert await status(session, role, "/health") == 0
    assert (role.running.has_started, role.running.num_closed) == (True, 1)


async def test_the_first_request_is_the_engine_s_own():
    role = FakeRole()
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        group.create_task(serve_until_signal(role))
        await until(session, role, "/ready", 200)
        assert len(role.made.engine.requests) == 1
        os.kill(os.getpid(), signal.SIGINT)


async def test_requests_under_way_finish_after_the_signal():
    role = FakeRole()
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        serving = group.create_task(serve_until_signal(role))
        await until(session, role, "/ready", 200)
        role.made.engine.gate = asyncio.Event()
        body = {"prompt": "hi", "stream": True}
        async with session.post(f"http://127.0.0.1:{role.port}/v1/completions", json=body) as response:
            assert response.status == 200
            os.kill(os.getpid(), signal.SIGTERM)
            await until(session, role, "/ready", 0)
            assert not serving.done()
            role.made.engine.gate.set()
            assert b"[DONE]" in await response.read()
    assert role.running.num_closed == 1


@pytest.mark.parametrize("error", [StartupError("the model is not there"), StartupError("no memory")])
async def test_a_role_that_cannot_be_loaded_says_why_and_gives_the_port_back(error: StartupError):
    role = FakeRole(fails=error)
    with pytest.raises(StartupError, match=str(error)):
        await serve_until_signal(role)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", role.port))


async def test_an_engine_that_cannot_generate_does_not_start():
    role = FakeRole()
    role.made.engine.fail_after, role.made.engine.error = 0, EngineError("shapes differ")
    with pytest.raises(StartupError, match="cannot generate: shapes differ"):
        await serve_until_signal(role)
    assert role.running.num_closed == 1


async def test_a_taken_port_is_named():
    role = FakeRole()
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", role.port))
        squatter.listen()
        with pytest.raises(StartupError, match=f"{role.port}: the port is taken"):
            await serve_until_signal(role)

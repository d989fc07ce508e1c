"""Stock vLLM and foreign routers out of `$PD_PEERS` as real processes, and a recorder in front of an engine."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from benchmarks.vllm_process import ROLES, let_others_first, pair_command, vllm_start
from tests.support.trio import MODEL, ROOT, free_port

VLLM_READY_WITHIN_S = 1200.0
ROUTER_READY_WITHIN_S = 60.0


def peers() -> Path:
    """The folder of the peer environments; skips the test where there is none."""
    folder = os.environ.get("PD_PEERS")
    if not folder:
        pytest.skip("PD_PEERS names no folder with vLLM and vllm-router")
    return Path(folder)


def has_model(folder: Path) -> None:
    """Make the default model a Hugging Face folder beside the environments, once."""
    model = folder / "model"
    if not (model / "model.safetensors").exists():
        command = [sys.executable, "-m", "common.engine.model.export", str(MODEL), str(model)]
        subprocess.run(command, cwd=ROOT, check=True)


@contextmanager
def process(command: Sequence[str], log: Path) -> Iterator[int]:
    """Run a command in a process group of its own, which is ended as a whole; yields its id."""
    with log.open("ab") as output:
        child = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        yield child.pid
    finally:
        os.killpg(child.pid, signal.SIGTERM)
        try:
            child.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def wait_ok(url: str, within_s: float, log: Path) -> None:
    """Wait until GET answers 200."""
    give_up_at = time.monotonic() + within_s
    while time.monotonic() < give_up_at:
        try:
            urllib.request.urlopen(url, timeout=2).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise AssertionError(f"{url} did not answer within {within_s:.0f} s:\n{log.read_text(errors='replace')[-3000:]}")


@contextmanager
def vllm_pair(folder: Path, logs: Path) -> Iterator[tuple[str, str]]:
    """A stock vLLM P and D over NIXL; yields their URLs."""
    has_model(folder)
    with ExitStack() as stack:
        starts = [vllm_start(folder, role) for role in ROLES]
        let_others_first(stack.enter_context(process(pair_command(starts, logs), logs / "pair.log")))
        for role, start in zip(ROLES, starts, strict=True):
            wait_ok(start.url + "/health", VLLM_READY_WITHIN_S, logs / f"{role}.log")
        yield starts[0].url, starts[1].url


@contextmanager
def plain_relay(folder: Path, prefill: str, decode: str, logs: Path) -> Iterator[str]:
    """A relay that makes the edits of vLLM's demo proxy; skips where `$PD_SHARED` does not bring it."""
    script = Path(os.environ.get("PD_SHARED", "")) / "peers" / "plain_relay.py"
    if not script.is_absolute() or not script.exists():
        pytest.skip("PD_SHARED names no folder with peers/plain_relay.py")
    port = free_port()
    command = [str(folder / "vllm/bin/python"), str(script), "--port", str(port)]
    with process([*command, "--prefill", prefill, "--decode", decode], logs / "relay.log"):
        wait_ok(f"http://127.0.0.1:{port}/openapi.json", ROUTER_READY_WITHIN_S, logs / "relay.log")
        yield f"http://127.0.0.1:{port}"


@contextmanager
def vllm_router(folder: Path, prefill: str, decode: str, logs: Path) -> Iterator[str]:
    """vllm-router in its P/D mode."""
    port = free_port()
    command = [str(folder / "router/bin/vllm-router"), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(free_port()), "--vllm-pd-disaggregation", "--kv-connector", "nixl"]
    command += ["--prefill", prefill, "--decode", decode, "--policy", "round_robin"]
    with process(command, logs / "router.log"):
        wait_ok(f"http://127.0.0.1:{port}/health", ROUTER_READY_WITHIN_S, logs / "router.log")
        yield f"http://127.0.0.1:{port}"


class Recorder:
    """Passes everything on to an engine and remembers the bodies it was sent."""

    def __init__(self, engine: str) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._engine = engine
        self._session: aiohttp.ClientSession | None = None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if body:
            self.bodies.append(msgspec.json.decode(body))
        assert self._session is not None
        headers = {"Content-Type": request.headers.get("Content-Type", "application/json")}
        url = self._engine + request.path
        async with self._session.request(request.method, url, data=body, headers=headers) as answer:
            kept = {name: answer.headers[name] for name in ("Content-Type",) if name in answer.headers}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            async for part in answer.content.iter_any():
                await response.write(part)
            await response.write_eof()
            return response

    async def serve(self) -> AsyncIterator[str]:
        """Yields the URL once, while it serves."""
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self.handle)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1)
        async with aiohttp.ClientSession() as self._session:
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            try:
                yield f"http://127.0.0.1:{runner.addresses[0][1]}"
            finally:
                await runner.cleanup()

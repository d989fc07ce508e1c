"""What operators do: keys, the fleet at run time, aborts, CORS, drain, reload, several workers."""

import asyncio
import contextlib
import hashlib
import json
import signal
import socket
import sys
from pathlib import Path

import aiohttp
import msgspec
import psutil
import pytest
from aiohttp import web

from common.clock import SystemClock
from proxy.config import FleetConfig, ProxyConfig
from proxy.fleet.worker import WorkerState
from proxy.server import running
from tests.support import mock_engine as mock
from tests.support.proxy_rig import FAST_PROBES, Rig, rig, until

COMPLETIONS = "/v1/completions"
BASE = {"model": "m", "prompt": "x"}
STREAM = {**BASE, "stream": True}


def key_file(path: Path, *keys: str) -> str:
    path.write_text("".join(f"{key}-owner {hashlib.sha256(key.encode()).hexdigest()}\n" for key in keys))
    return str(path)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_client_keys_open_the_api_and_never_reach_the_engines(tmp_path: Path) -> None:
    async with rig(keys={"client_file": key_file(tmp_path / "keys", "k1")}) as r:
        for headers in ({}, bearer("wrong")):
            status, _, body = await r.post(BASE, headers=headers)
            assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")
        assert not r.p.calls()
        assert (await r.post(BASE, headers=bearer("k1")))[0] == 200
        assert "Authorization" not in r.p.calls()[0].headers
        for path in ("/health", "/ready", "/metrics"):
            assert (await r.get(path))[0] == 200
        assert (await r.get("/v1/models"))[0] == 401


async def test_administration_is_off_without_a_key_file_and_closed_to_clients(tmp_path: Path) -> None:
    async with rig() as r:
        assert (await r.get("/admin/fleet"))[0] == 403
    keys = {"client_file": key_file(tmp_path / "c", "k1"), "admin_file": key_file(tmp_path / "a", "root")}
    async with rig(keys=keys) as r:
        assert (await r.get("/admin/fleet", headers=bearer("k1")))[0] == 401
        assert (await r.get("/admin/fleet", headers=bearer("root")))[0] == 200


async def order(r: Rig, action: str, url: str, role: str = "decode") -> tuple[int, dict[str, str]]:
    body = {"action": action, "role": role, "url": url}
    status, _, answer = await r.post(body, "/admin/fleet", headers=bearer("root"))
    workers = json.loads(answer).get("workers", [])
    return status, {worker["url"]: worker["state"] for worker in workers}


async def test_engines_come_and_go_at_run_time(tmp_path: Path) -> None:
    async with rig(num_decode=2, keys={"admin_file": key_file(tmp_path / "a", "root")}) as r:
        old, new = r.decode
        assert (await order(r, "remove", new.url))[0] == 200
        assert (await order(r, "remove", new.url))[0] == 404
        status, states = await order(r, "add", new.url)
        assert (status, states[new.url]) == (200, "starting")
        await until(lambda: all(worker.is_routable for worker in r.services.fleet.all()))
        assert (await order(r, "drain", old.url))[1][old.url] == "draining"
        for _ in range(3):
            assert (await r.post(BASE))[0] == 200
        assert (len(old.calls()), len(new.calls())) == (0, 3)
        assert (await order(r, "undrain", old.url))[0] == 200
        await until(lambda: all(worker.is_routable for worker in r.services.fleet.all()))


@pytest.mark.parametrize(
    "body",
    [b"{", {"action": "explode", "role": "decode", "url": "http://x"}, {"action": "add", "role": "x", "url": ""}],
)
async def test_orders_that_make_no_sense_are_400(tmp_path: Path, body: object) -> None:
    async with rig(keys={"admin_file": key_file(tmp_path / "a", "root")}) as r:
        assert (await r.post(body, "/admin/fleet", headers=bearer("root")))[0] == 400


@pytest.mark.parametrize("leg", ["p", "d"])
async def test_an_abort_by_id_ends_the_leg_under_way_and_answers_the_client(leg: str) -> None:
    async with rig() as r:
        engine = r.p if leg == "p" else r.d
        engine.script(COMPLETIONS, mock.hangs)
        asking = asyncio.ensure_future(r.post(STREAM, headers={"X-Request-Id": "id-1"}))
        await engine.arrived.wait()
        status, _, body = await r.post({"request_id": "id-1"}, "/abort")
        assert (status, json.loads(body)) == (200, {"aborted": 1})
        status, headers, body = await asking
        assert (status, json.loads(body)["error"]["code"]) == (499, "request_aborted")
        assert headers["X-Request-Id"] == "id-1"
        await engine.cancelled.wait()
        r.assert_nothing_is_held()
        assert (await r.post({"request_id": "id-1"}, "/abort"))[0] == 404


async def test_an_abort_in_mid_stream_ends_it_with_an_error_event() -> None:
    async with rig() as r:

        async def stalls(request: web.Request, body: bytes) -> web.StreamResponse:
            response = await mock.begin_stream(request)
            await response.write(mock.chunk(0))
            return await mock.hangs(request, body)

        r.d.script(COMPLETIONS, stalls)
        headers = {"X-Request-Id": "id-1"}
        async with r.session.post(r.url + COMPLETIONS, json=STREAM, headers=headers) as answer:
            assert await answer.content.readany() == mock.chunk(0)
            await r.post({"request_id": "id-1"}, "/abort")
            rest = await answer.content.read()
        assert json.loads(rest.removeprefix(b"data: "))["error"]["code"] == "request_aborted"
        await r.d.cancelled.wait()
        r.assert_nothing_is_held()


async def test_one_clients_key_cannot_abort_anothers_request(tmp_path: Path) -> None:
    async with rig(keys={"client_file": key_file(tmp_path / "keys", "k1", "k2")}) as r:
        r.d.script(COMPLETIONS, mock.hangs)
        asking = asyncio.ensure_future(r.post(STREAM, headers={"X-Request-Id": "id-1", **bearer("k1")}))
        await r.d.arrived.wait()
        assert (await r.post({"request_id": "id-1"}, "/abort", headers=bearer("k2")))[0] == 404
        assert (await r.post({"request_id": "id-1"}, "/abort", headers=bearer("k1")))[0] == 200
        assert (await asking)[0] == 499


async def test_browsers_of_allowed_origins_may_call_and_read() -> None:
    async with rig(cors_origins=["https://a"]) as r:
        origin = {"Origin": "https://a"}
        asked = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        async with r.session.options(r.url + COMPLETIONS, headers=asked) as answer:
            assert answer.status == 204
            assert answer.headers["Access-Control-Allow-Methods"] == "POST"
        for body in (BASE, STREAM, b"{"):
            _, headers, _ = await r.post(body, headers=origin)
            assert headers["Access-Control-Allow-Origin"] == "https://a"
        assert "Access-Control-Allow-Origin" not in (await r.post(BASE, headers={"Origin": "https://b"}))[1]
        async with r.session.options(r.url + COMPLETIONS, headers={"Origin": "https://b"}) as answer:
            assert answer.status == 405


async def test_a_stopping_proxy_finishes_what_is_under_way() -> None:
    gate = asyncio.Event()
    async with mock.serving(mock.MockEngine("P")) as p, mock.serving(mock.MockEngine("D")) as d:

        async def waits(request: web.Request, body: bytes) -> web.StreamResponse:
            await gate.wait()
            return await mock.stream(request, [mock.chunk(0)])

        d.script(COMPLETIONS, waits)
        fleet = msgspec.convert({"prefill": [p.url], "decode": [d.url], **FAST_PROBES}, FleetConfig)
        async with aiohttp.ClientSession() as session:
            async with running(ProxyConfig(port=0, fleet=fleet, drain_s=30.0), SystemClock()) as proxy:
                await proxy.services.fleet.wait_ready()
                url = f"http://127.0.0.1:{proxy.port}{COMPLETIONS}"
                asking = asyncio.ensure_future(session.post(url, json=STREAM))
                await d.arrived.wait()
                asyncio.get_running_loop().call_later(0.05, gate.set)
            answer = await asking
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")


async def test_reload_takes_over_engines_and_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    async with rig(num_decode=2, keys={"client_file": key_file(path, "k1")}) as r:
        key_file(path, "k2")
        config = r.services.config
        kept = msgspec.structs.replace(config.fleet, decode=(r.decode[1].url,))
        r.proxy.reload(msgspec.structs.replace(config, fleet=kept))
        assert (await r.post(BASE, headers=bearer("k1")))[0] == 401
        for _ in range(3):
            assert (await r.post(BASE, headers=bearer("k2")))[0] == 200
        assert (len(r.decode[0].calls()), len(r.decode[1].calls())) == (0, 3)


@pytest.mark.slow
async def test_several_workers_share_the_port_and_a_lost_one_comes_back(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    async with mock.serving(mock.MockEngine("P")) as p, mock.serving(mock.MockEngine("D")) as d:
        path = tmp_path / "pd.yaml"
        path.write_text(f"proxy: {{port: {port}, fleet: {{prefill: ['{p.url}'], decode: ['{d.url}']}}}}\n")
        command = [sys.executable, "-m", "proxy", "--config", str(path), "--workers", "2"]
        proxy = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
        try:
            async with asyncio.timeout(30), aiohttp.ClientSession() as session:
                for _ in range(6):
                    await serves(session, f"http://127.0.0.1:{port}{COMPLETIONS}")
                await counts(session, f"http://127.0.0.1:{port}/metrics", 6)
                first, second = psutil.Process(proxy.pid).children()
                first.kill()
                while len({child.pid for child in psutil.Process(proxy.pid).children()} - {first.pid}) < 2:  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.05)
                second.kill()
                await serves(session, f"http://127.0.0.1:{port}{COMPLETIONS}")
                await counts(session, f"http://127.0.0.1:{port}/metrics", 7)
        finally:
            proxy.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(proxy.wait(), 10) == 0


@pytest.mark.slow
async def test_orders_reach_all_workers_and_those_that_start_later(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url, fresh = f"http://127.0.0.1:{port}", {"Connection": "close"}
    async with mock.serving(mock.MockEngine("P")) as p, mock.serving(mock.MockEngine("D")) as d:
        path = tmp_path / "pd.yaml"
        keys = f"keys: {{admin_file: {key_file(tmp_path / 'a', 'root')}}}"
        path.write_text(f"proxy: {{port: {port}, {keys}, fleet: {{prefill: ['{p.url}'], decode: ['{d.url}']}}}}\n")
        command = [sys.executable, "-m", "proxy", "--config", str(path), "--workers", "2"]
        proxy = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
        try:
            async with asyncio.timeout(60), aiohttp.ClientSession() as session:
                await serves(session, url + COMPLETIONS)
                for number in range(4):
                    asking = await hanging(session, url + COMPLETIONS, d, {"X-Request-Id": f"id-{number}", **fresh})
                    order = {"request_id": f"id-{number}"}
                    async with session.post(url + "/abort", json=order, headers=fresh) as answer:
                        assert await answer.json() == {"aborted": 1}
                    assert (await asking).status == 499
                order = {"action": "add", "role": "decode", "url": "http://127.0.0.1:9"}
                async with session.post(url + "/admin/fleet", json=order, headers=bearer("root")) as answer:
                    assert answer.status == 200
                for _ in range(4):
                    assert order["url"] in await told_engines(session, url)
                lost = psutil.Process(proxy.pid).children()[0]
                lost.kill()
                while len({child.pid for child in psutil.Process(proxy.pid).children()} - {lost.pid}) < 2:  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.05)
                for _ in range(8):
                    assert order["url"] in await told_engines(session, url)
        finally:
            proxy.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(proxy.wait(), 10) == 0


async def told_engines(session: aiohttp.ClientSession, url: str) -> set[str]:
    """The engines that whichever process answers tells of."""
    while True:
        with contextlib.suppress(aiohttp.ClientError):
            headers = {"Connection": "close", **bearer("root")}
            async with session.get(url + "/admin/fleet", headers=headers) as answer:
                return {worker["url"] for worker in (await answer.json())["workers"]}
        await asyncio.sleep(0.05)  # other processes


async def counts(session: aiohttp.ClientSession, url: str, number: int) -> None:
    """Scrape, whichever process answers, until it tells of `number` requests in all."""
    told = f'pd_proxy_requests_total{{outcome="done",path="{COMPLETIONS}"}} {number}.0\n'
    while True:
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get(url, headers={"Connection": "close"}) as answer:
                if told in await answer.text():
                    return
        await asyncio.sleep(0.05)  # other processes, whose files are a second old


async def hanging(
    session: aiohttp.ClientSession, url: str, d: mock.MockEngine, headers: dict[str, str]
) -> asyncio.Future[aiohttp.ClientResponse]:
    """A request that hangs on D. Whichever process it meets may be starting: then it is asked again."""
    d.arrived.clear()
    d.script(COMPLETIONS, mock.hangs)
    while True:
        asking = asyncio.ensure_future(session.post(url, json=STREAM, headers=headers))
        arrived = asyncio.ensure_future(d.arrived.wait())
        await asyncio.wait({asking, arrived}, return_when=asyncio.FIRST_COMPLETED)
        if arrived.done():
            return asking
        arrived.cancel()
        assert (await asking).status == 503
        await asyncio.sleep(0.05)  # another process


async def serves(session: aiohttp.ClientSession, url: str) -> None:
    """Ask until an answer comes."""
    while True:
        try:
            async with session.post(url, json=STREAM, headers={"Connection": "close"}) as answer:
                if (await answer.read()).endswith(b"data: [DONE]\n\n"):
                    return
        except aiohttp.ClientError:
            await asyncio.sleep(0.05)  # another process: nothing to wait on but time


async def test_drained_engines_keep_their_state_through_probes(tmp_path: Path) -> None:
    async with rig(num_decode=2, keys={"admin_file": key_file(tmp_path / "a", "root")}) as r:
        await order(r, "drain", r.d.url)
        (worker,) = [w for w in r.services.fleet.all() if w.url == r.d.url]
        for _ in range(50):
            await asyncio.sleep(0)
        assert worker.state is WorkerState.DRAINING

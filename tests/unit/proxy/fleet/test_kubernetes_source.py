"""Engines from EndpointSlices, through the official client against a small API server over real HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from common.clock import ManualClock
from proxy.config import FleetConfig, KubernetesConfig
from proxy.fleet.kubernetes_source import KubernetesSource
from proxy.fleet.membership import Fleet
from proxy.fleet.worker import Role

KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: c
contexts: [{{name: c, context: {{cluster: c, user: u}}}}]
clusters: [{{name: c, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
users: [{{name: u, user: {{token: secret}}}}]
"""


def endpoint_slice(name: str, *endpoints: dict[str, Any], kind: str = "IPv4", port: int = 8000) -> dict[str, Any]:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "resourceVersion": "1"},
        "addressType": kind,
        "ports": [{"name": "metrics", "port": 9}, {"name": "http", "port": port}],
        "endpoints": list(endpoints),
    }


def at(address: str, ready: bool | None = True) -> dict[str, Any]:
    return {"addresses": [address], "conditions": {} if ready is None else {"ready": ready}}


class ApiServer:
    """Lists and watches EndpointSlices per selector; a watch ends when a test says so."""

    def __init__(self) -> None:
        self.listed: dict[str, list[dict[str, Any]]] = {}
        self.watches: dict[str, asyncio.Queue[dict[str, Any] | None]] = {}
        self.num_lists = 0
        self.failures: list[int] = []
        self.tokens: set[str | None] = set()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.tokens.add(request.headers.get("Authorization"))
        selector = request.query["labelSelector"]
        if self.failures:
            return web.json_response({"message": "no"}, status=self.failures.pop(0))
        if "watch" in request.query:
            return await self._watch(request, selector)
        self.num_lists += 1
        items = self.listed.get(selector, [])
        head = {"kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1"}
        return web.json_response({**head, "metadata": {"resourceVersion": "7"}, "items": items})

    async def _watch(self, request: web.Request, selector: str) -> web.StreamResponse:
        assert request.query["resourceVersion"] == "7"
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        events = self.watches[selector] = asyncio.Queue()
        while (event := await events.get()) is not None:
            await response.write(json.dumps(event).encode() + b"\n")
        return response


@asynccontextmanager
async def following(tmp_path: Path, **keys: Any) -> AsyncIterator[tuple[ApiServer, Fleet]]:
    server = ApiServer()
    runner = web.ServerRunner(web.Server(server.handle), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(KUBECONFIG.format(port=runner.addresses[0][1]))
    fleet = Fleet(FleetConfig(decode=("http://static:1",)), ManualClock())
    settings = {"prefill": "app=p", "decode": "app=d", "port": "http", "retry_s": 0.01, **keys}
    source = KubernetesSource(KubernetesConfig(kubeconfig=str(kubeconfig), **settings), fleet)
    try:
        async with asyncio.TaskGroup() as group:
            server.listed = {
                "app=p": [endpoint_slice("p-1", at("10.0.0.1"), at("10.0.0.2", ready=False), at("10.0.0.3", None))],
                "app=d": [endpoint_slice("d-1", at("fd00::1"), kind="IPv6")],
            }
            running = group.create_task(source.run())
            await until(lambda: len(server.watches) == 2)
            yield server, fleet
            running.cancel()
    finally:
        await runner.cleanup()


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - watches state that has no event of its own
        await asyncio.sleep(0.001)


def urls(fleet: Fleet, role: Role) -> set[str]:
    return {worker.url for worker in fleet.of(role)}


async def test_what_is_listed_and_ready_joins_the_fleet(tmp_path: Path) -> None:
    async with following(tmp_path) as (server, fleet):
        assert urls(fleet, Role.PREFILL) == {"http://10.0.0.1:8000", "http://10.0.0.3:8000"}
        assert urls(fleet, Role.DECODE) == {"http://static:1", "http://[fd00::1]:8000"}
        assert server.tokens == {"Bearer secret"}


async def test_changes_are_followed_as_they_are_told(tmp_path: Path) -> None:
    async with following(tmp_path) as (server, fleet):
        kept = fleet.find(Role.PREFILL, "http://10.0.0.1:8000")
        watch = server.watches["app=p"]
        watch.put_nowait({"type": "ADDED", "object": endpoint_slice("p-2", at("10.0.0.9"), port=81)})
        await until(lambda: "http://10.0.0.9:81" in urls(fleet, Role.PREFILL))
        watch.put_nowait({"type": "MODIFIED", "object": endpoint_slice("p-1", at("10.0.0.1"))})
        watch.put_nowait({"type": "DELETED", "object": endpoint_slice("p-2")})
        await until(lambda: urls(fleet, Role.PREFILL) == {"http://10.0.0.1:8000"})
        assert fleet.find(Role.PREFILL, "http://10.0.0.1:8000") is kept
        assert urls(fleet, Role.DECODE) == {"http://static:1", "http://[fd00::1]:8000"}


async def end_by_server(watch: "asyncio.Queue[dict[str, Any] | None]") -> None:
    watch.put_nowait(None)


async def version_too_old(watch: "asyncio.Queue[dict[str, Any] | None]") -> None:
    watch.put_nowait({"type": "ERROR", "object": {"code": 410, "reason": "Expired", "message": "too old"}})


async def nonsense(watch: "asyncio.Queue[dict[str, Any] | None]") -> None:
    watch.put_nowait({"no": "event"})


@pytest.mark.parametrize("end", [end_by_server, version_too_old, nonsense])
async def test_a_watch_that_ends_begins_again_with_a_fresh_list(tmp_path: Path, end: Any) -> None:
    async with following(tmp_path) as (server, fleet):
        old = server.watches["app=p"]
        server.listed["app=p"] = [endpoint_slice("p-1", at("10.0.0.7"))]
        await end(old)
        await until(lambda: urls(fleet, Role.PREFILL) == {"http://10.0.0.7:8000"})
        await until(lambda: server.watches["app=p"] is not old)


async def test_while_the_cluster_does_not_answer_what_was_known_holds(tmp_path: Path) -> None:
    async with following(tmp_path) as (server, fleet):
        old = server.watches["app=p"]
        server.failures = [500, 403, 503]
        server.listed["app=p"] = []
        old.put_nowait(None)
        await until(lambda: len(server.failures) == 1)
        assert urls(fleet, Role.PREFILL) == {"http://10.0.0.1:8000", "http://10.0.0.3:8000"}
        await until(lambda: urls(fleet, Role.PREFILL) == set())


async def test_without_a_port_name_the_first_one_is_taken(tmp_path: Path) -> None:
    async with following(tmp_path, port=None) as (_, fleet):
        assert "http://10.0.0.1:9" in urls(fleet, Role.PREFILL)

"""TLS of the proxy and of the engines, under asyncio's event loop and under uvloop, which do it in different ways."""

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
import uvloop

from common.clock import SystemClock
from common.openai.sse import DONE
from proxy.config import FleetConfig, ProxyConfig
from proxy.server import RunningProxy, running
from tests.support import mock_engine as mock
from tests.support.certificates import Certificate, self_signed
from tests.support.proxy_rig import FAST_PROBES
from tests.support.serving_rig import serving_rig

COMPLETIONS = "/v1/completions"
BASE = {"model": "m", "prompt": "x"}
STREAM = {**BASE, "stream": True}
MAX_BODY_BYTES = 3 << 20

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    def on_loop(work: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(work)

    return on_loop


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return self_signed(tmp_path_factory.mktemp("tls"))


@asynccontextmanager
async def proxy_with(tls: dict[str, str], certificate: Certificate) -> AsyncIterator[tuple[RunningProxy, str]]:
    """A proxy in front of engines that speak TLS and ask for its certificate; `tls` is its own section."""
    engines = certificate.server(asks_clients=True)
    inner = {"ca_file": certificate.cert, "cert_file": certificate.cert, "key_file": certificate.key}
    async with (
        mock.serving(mock.MockEngine("P"), tls=engines) as p,
        mock.serving(mock.MockEngine("D"), tls=engines) as d,
    ):
        fleet = msgspec.convert({"prefill": [p.url], "decode": [d.url], **FAST_PROBES}, FleetConfig)
        settings = {"port": 0, "tls": tls, "engine_tls": inner, "drain_s": 1.0, "max_body_bytes": MAX_BODY_BYTES}
        config = msgspec.structs.replace(msgspec.convert(settings, ProxyConfig), fleet=fleet)
        async with running(config, SystemClock()) as proxy:
            await proxy.services.fleet.wait_ready()
            yield proxy, f"https://localhost:{proxy.port}"


def test_tls_on_both_sides_of_the_proxy_with_certificates_of_the_callers(run: Run, certificate: Certificate) -> None:
    outer = {"cert_file": certificate.cert, "key_file": certificate.key, "client_ca_file": certificate.cert}

    async def ask() -> None:
        async with proxy_with(outer, certificate) as (_, url), aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientError):
                await session.post(url + COMPLETIONS, json=STREAM, ssl=certificate.client())
            own = certificate.client(shows_own=True)
            async with session.post(url + COMPLETIONS, json=STREAM, ssl=own) as answer:
                assert (await answer.read()).endswith(DONE)

    run(ask())


def test_one_connection_serves_large_bodies_refusals_and_streams_in_turn(run: Run, certificate: Certificate) -> None:
    async def ask() -> None:
        outer = {"cert_file": certificate.cert, "key_file": certificate.key}
        connector = aiohttp.TCPConnector(limit=1, ssl=certificate.client())
        async with proxy_with(outer, certificate) as (_, url), aiohttp.ClientSession(connector=connector) as session:
            large = msgspec.json.encode({**STREAM, "prompt": "x" * (MAX_BODY_BYTES - 1000)})
            for body, status in ((large, 200), (b"{", 400), (large, 200), (b"x" * (MAX_BODY_BYTES + 1), 413)):
                async with session.post(url + COMPLETIONS, data=io.BytesIO(body)) as answer:
                    assert answer.status == status
                    assert (await answer.read()).endswith(DONE) == (status == 200)

    run(ask())


def test_who_speaks_no_tls_or_trusts_nobody_gets_no_answer_and_disturbs_nobody(
    run: Run, certificate: Certificate
) -> None:
    async def ask() -> None:
        outer = {"cert_file": certificate.cert, "key_file": certificate.key}
        async with proxy_with(outer, certificate) as (proxy, url), aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientError):
                await session.get(f"http://localhost:{proxy.port}/health")
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await session.get(f"{url}/health")
            async with session.post(url + COMPLETIONS, json=BASE, ssl=certificate.client()) as answer:
                assert answer.status == 200

    run(ask())


def test_engines_serve_tls_and_ask_for_the_certificates_of_their_callers(run: Run, certificate: Certificate) -> None:
    async def ask() -> None:
        async with serving_rig(tls=certificate.server(asks_clients=True)) as rig:
            with pytest.raises(aiohttp.ClientError):
                await rig.session.get(rig.url + "/health", ssl=certificate.client())
            own = certificate.client(shows_own=True)
            async with rig.session.post(rig.url + COMPLETIONS, json=STREAM, ssl=own) as answer:
                assert (await answer.read()).endswith(DONE)

    run(ask())

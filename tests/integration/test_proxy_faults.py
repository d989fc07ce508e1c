"""What becomes of a request when an engine, the network or the client fails (DESIGN §6; journey row x)."""

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from proxy.fleet.worker import Role
from tests.support import mock_engine as mock
from tests.support.proxy_rig import Rig, rig, until

COMPLETIONS = "/v1/completions"
STREAM: dict[str, Any] = {"model": "m", "prompt": "x", "stream": True}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "r", "schema": {"type": "nonsense"}}}


async def drained(r: Rig) -> None:
    """Let what the proxy does in the background come to its end."""
    await until(lambda: r.services.admission.num_running == 0 and r.services.background.num_tasks <= 2)
    r.assert_nothing_is_held()


def released(r: Rig) -> list[dict[str, Any]]:
    return [call.json for call in r.p.calls("/kv/release")]


@pytest.mark.parametrize("is_stream", [True, False])
async def test_ds_refusal_arrives_as_ds_refusal_and_p_lets_go(is_stream: bool) -> None:
    async with rig() as r:
        r.d.script(COMPLETIONS, mock.answers(400, "too long"))
        status, headers, body = await r.post({**STREAM, "stream": is_stream})
        assert (status, json.loads(body)["error"]["message"]) == (400, "too long")
        assert headers["Content-Type"].startswith("application/json")
        await drained(r)
        assert released(r) == [{"request_id": "r-1", "lease_id": "lease-1"}]


@pytest.mark.parametrize("status", [400, 401, 404, 422])
async def test_ps_refusal_is_final_and_d_is_never_asked(status: int) -> None:
    async with rig(num_prefill=2) as r:
        for engine in r.prefill:
            engine.always[COMPLETIONS] = mock.answers(status, "temperature must be >= 0")
        got, _, body = await r.post({**STREAM, "temperature": -5})
        assert (got, json.loads(body)["error"]["message"]) == (status, "temperature must be >= 0")
        assert (sum(len(e.calls()) for e in r.prefill), len(r.d.calls())) == (1, 0)
        assert all(worker.is_routable for worker in r.services.fleet.all())
        await drained(r)


async def test_a_constraint_that_d_refuses_cancels_the_prefill_leg() -> None:
    async with rig() as r:
        r.p.script(COMPLETIONS, mock.hangs)
        r.d.script("/prepare", mock.answers(400, "unknown type 'nonsense'"))
        status, _, body = await r.post({**STREAM, "response_format": SCHEMA})
        assert (status, json.loads(body)["error"]["message"]) == (400, "unknown type 'nonsense'")
        await r.p.cancelled.wait()
        assert not r.d.calls(COMPLETIONS)
        await drained(r)


@pytest.mark.parametrize("prepare", [mock.answers(404), mock.answers(500), mock.drops])
async def test_a_prepare_leg_that_fails_costs_only_the_head_start(prepare: mock.Script) -> None:
    async with rig() as r:
        r.d.script("/prepare", prepare)
        assert (await r.post({**STREAM, "response_format": SCHEMA}))[0] == 200


@pytest.mark.parametrize("failure", [*map(mock.answers, (408, 429, 500, 502, 503, 504)), mock.drops])
async def test_another_p_takes_over(failure: mock.Script) -> None:
    async with rig(num_prefill=2) as r:
        for engine in r.prefill:
            engine.script(COMPLETIONS, failure)
        r.prefill[0].scripts.clear()
        r.prefill[1].always[COMPLETIONS] = failure
        for _ in range(3):
            status, _, _ = await r.post(STREAM)
            assert status == 200
        assert all("kv_transfer_params" in call.json for call in r.d.calls())
        await drained(r)


@pytest.mark.parametrize("failure", [mock.answers(500), mock.answers(503), mock.drops])
async def test_without_another_p_the_policy_lets_d_prefill(failure: mock.Script) -> None:
    async with rig() as r:
        r.p.always[COMPLETIONS] = failure
        status, _, _ = await r.post(STREAM)
        assert status == 200
        assert "kv_transfer_params" not in r.d.calls()[0].json
        assert b'pd_fallback_total{reason="prefill_failed"} 1.0' in (await r.get("/metrics"))[2]
        await drained(r)


async def test_the_policy_fail_answers_ps_failure() -> None:
    async with rig(retries={"on_prefill_failure": "fail"}) as r:
        r.p.always[COMPLETIONS] = mock.answers(500, "p broke")
        status, _, body = await r.post(STREAM)
        assert (status, json.loads(body)["error"]["message"]) == (500, "p broke")
        r.p.always[COMPLETIONS] = mock.drops
        status, _, body = await r.post(STREAM)
        assert (status, json.loads(body)["error"]["code"]) == (502, "upstream_broken")
        await drained(r)


async def test_an_overloaded_p_is_no_reason_to_load_d() -> None:
    async with rig() as r:
        r.p.always[COMPLETIONS] = mock.answers(429, "full", **{"Retry-After": "7"})
        status, headers, _ = await r.post(STREAM)
        assert (status, headers["Retry-After"], len(r.d.calls())) == (429, "7", 0)


@pytest.mark.parametrize("failure", [*map(mock.answers, (408, 429, 500, 502, 503, 504)), mock.drops])
@pytest.mark.parametrize("is_stream", [True, False])
async def test_another_d_takes_over_with_the_same_kv(failure: mock.Script, is_stream: bool) -> None:
    async with rig(num_decode=2) as r:
        r.decode[0].always[COMPLETIONS] = failure
        for _ in range(3):
            assert (await r.post({**STREAM, "stream": is_stream}))[0] == 200
        assert len(r.p.calls(COMPLETIONS)) == 3
        assert all(call.json["kv_transfer_params"]["lease_id"] == "lease-1" for call in r.decode[1].calls())
        await drained(r)
        assert not released(r)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("failure", ["no connection", "no answer in time"])
async def test_another_engine_takes_over_from_one_that_does_not_answer(role: Role, failure: str) -> None:
    rarely = {"probe_interval_s": 60, "calm_probe_interval_s": 60}  # legs find out, not probes
    limits = {"prefill_s": 0.2, "first_token_s": 0.2}
    async with rig(fleet=rarely, timeouts=limits, routing={role.value: "round_robin"}) as r:
        other = mock.MockEngine(role.value[0].upper())
        other.always[COMPLETIONS] = mock.hangs
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(mock.serving(other))
            worker = r.services.fleet.add(role, other.url)
            await until(lambda: worker.is_routable)
            if failure == "no connection":
                await stack.aclose()
            for _ in range(2):
                assert (await r.post(STREAM))[0] == 200
            await drained(r)
        cause = "timeout" if failure == "no answer in time" else "unreachable"
        told = f'pd_proxy_retries_total{{cause="{cause}",leg="{role.value}"}}'
        assert told.encode() in (await r.get("/metrics"))[2]


async def test_a_d_that_breaks_off_a_whole_answer_is_retried() -> None:
    async with rig() as r:

        async def half(request: web.Request, body: bytes) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "100"})
            await response.prepare(request)
            await response.write(b'{"half":')
            assert request.transport is not None
            request.transport.close()
            return response

        r.d.script(COMPLETIONS, half)
        status, _, body = await r.post({"prompt": "x"})
        assert (status, json.loads(body)["choices"][0]["text"]) == (200, "a b")


async def test_when_every_d_fails_the_client_hears_and_p_lets_go() -> None:
    async with rig() as r:
        r.d.always[COMPLETIONS] = mock.drops
        status, _, body = await r.post(STREAM)
        assert (status, json.loads(body)["error"]["code"]) == (502, "upstream_broken")
        await drained(r)
        assert len(released(r)) == 1


@pytest.mark.parametrize(
    "pieces", [(b'data: {"choices":[{"del',), (mock.chunk(0), b"data: {"), (mock.chunk(0),), (mock.chunk(0)[:-1],)]
)
async def test_a_d_that_dies_in_mid_stream_ends_it_with_an_error_event_of_its_own(pieces: tuple[bytes, ...]) -> None:
    async with rig() as r:
        r.d.script(COMPLETIONS, mock.dies_after(*pieces))
        status, _, body = await r.post(STREAM)
        assert status == 200
        *_, last = [event for event in body.split(b"\n\n") if event]
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "upstream_broken"
        assert body.endswith(b"\n\n")
        assert b"[DONE]" not in body
        assert b"finish_reason" not in body
        await drained(r)


async def test_the_connection_of_a_broken_stream_serves_a_request_that_comes_at_once_and_closes_otherwise() -> None:
    async with rig() as r:
        r.d.script(COMPLETIONS, mock.dies_after(mock.chunk(0)), mock.dies_after(mock.chunk(0)))
        reader, writer = await asyncio.open_connection("127.0.0.1", r.proxy.port)
        body = json.dumps(STREAM).encode()
        request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        writer.write(request)
        assert b'"error"' in await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.write(request)
        assert b'"error"' in await reader.readuntil(b"\r\n0\r\n\r\n")
        assert await reader.read() == b""
        writer.close()


async def test_a_d_that_dies_after_its_end_marker_has_said_everything() -> None:
    async with rig() as r:
        r.d.script(COMPLETIONS, mock.dies_after(mock.chunk(0), b"data: [DONE]\n\n"))
        _, _, body = await r.post(STREAM)
        assert body == mock.chunk(0) + b"data: [DONE]\n\n"
        await drained(r)


async def test_a_silent_d_is_given_up_in_mid_stream() -> None:
    async with rig(timeouts={"stream_idle_s": 0.05}) as r:

        async def stalls(request: web.Request, body: bytes) -> web.StreamResponse:
            response = await mock.begin_stream(request)
            await response.write(mock.chunk(0))
            await asyncio.Event().wait()
            return response

        r.d.script(COMPLETIONS, stalls)
        _, _, body = await r.post(STREAM)
        assert json.loads(body.split(b"\n\n")[-2].removeprefix(b"data: "))["error"]["code"] == "upstream_timeout"
        await r.d.cancelled.wait()


@pytest.mark.parametrize("leg", ["p", "d"])
async def test_legs_that_take_too_long_answer_504(leg: str) -> None:
    timeouts = {"prefill_s": 0.05, "first_token_s": 0.05}
    async with rig(timeouts=timeouts, retries={"on_prefill_failure": "fail"}) as r:
        engine = r.p if leg == "p" else r.d
        engine.always[COMPLETIONS] = mock.hangs
        status, _, body = await r.post(STREAM)
        assert (status, json.loads(body)["error"]["code"]) == (504, "upstream_timeout")
        await engine.cancelled.wait()
        await drained(r)


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("leg", ["p", "d"])
async def test_a_client_that_leaves_cancels_the_leg_under_way(leg: str, is_stream: bool) -> None:
    async with rig() as r:
        engine = r.p if leg == "p" else r.d
        engine.script(COMPLETIONS, mock.hangs)
        async with aiohttp.ClientSession() as session:
            asking = asyncio.ensure_future(session.post(r.url + COMPLETIONS, json={**STREAM, "stream": is_stream}))
            await engine.arrived.wait()
            asking.cancel()
        await engine.cancelled.wait()
        await drained(r)
        assert len(r.d.calls()) == (0 if leg == "p" else 1)
        assert not released(r)  # D itself tells P, having been reached
        assert (await r.post(STREAM))[0] == 200


async def test_a_client_that_leaves_in_mid_stream_stops_d() -> None:
    async with rig() as r:

        async def endless(request: web.Request, body: bytes) -> web.StreamResponse:
            response = await mock.begin_stream(request)
            while True:
                await response.write(mock.chunk(0))
                await asyncio.sleep(0.001)

        r.d.script(COMPLETIONS, endless)
        async with aiohttp.ClientSession() as session, session.post(r.url + COMPLETIONS, json=STREAM) as answer:
            await answer.content.readany()
            answer.close()
        await drained(r)
        assert b'outcome="cancelled"' in (await r.get("/metrics"))[2]


async def test_a_dead_p_leaves_the_fleet_and_comes_back_by_itself() -> None:
    async with rig(num_prefill=2) as r:
        (worker,) = [w for w in r.services.fleet.all() if w.name == f"127.0.0.1:{r.p.port}"]
        r.p.is_ready = False
        await until(lambda: not worker.is_routable)
        assert (await r.post(STREAM))[0] == 200
        assert not r.p.calls()
        r.p.is_ready = True
        await until(lambda: worker.is_routable)


async def test_a_p_found_dead_fails_the_prefill_it_still_holds_and_another_takes_over() -> None:
    async with rig(num_prefill=2, routing={"prefill": "round_robin"}) as r:
        r.prefill[1].script(COMPLETIONS, mock.hangs)
        asking = asyncio.ensure_future(r.post(STREAM))
        await r.prefill[1].arrived.wait()
        r.prefill[1].is_ready = False
        status, _, _ = await asking
        assert status == 200
        assert len(r.prefill[0].calls()) == 1
        await drained(r)


async def test_failing_legs_open_the_circuit_though_probes_are_fine() -> None:
    async with rig(num_prefill=2, fleet={"breaker_failures": 2}, routing={"prefill": "round_robin"}) as r:
        r.p.always[COMPLETIONS] = mock.answers(500)
        (worker,) = [w for w in r.services.fleet.all() if w.url == r.p.url]
        for _ in range(8):
            assert (await r.post(STREAM))[0] == 200
            await until(lambda: not worker.breaker.is_suspect)
        assert len(r.p.calls()) == 2


async def test_after_one_failure_others_are_preferred_until_a_probe_is_answered() -> None:
    rarely = {"probe_interval_s": 60, "calm_probe_interval_s": 60}
    async with rig(num_prefill=2, fleet=rarely, routing={"prefill": "round_robin"}) as r:
        r.p.always[COMPLETIONS] = mock.answers(500)
        for _ in range(8):
            assert (await r.post(STREAM))[0] == 200
        assert len(r.p.calls()) == 1
        assert b'pd_proxy_retries_total{cause="server_error",leg="prefill"} 1.0' in (await r.get("/metrics"))[2]


async def test_when_all_p_are_gone_the_policy_lets_d_serve() -> None:
    async with rig() as r:
        (worker,) = [w for w in r.services.fleet.all() if w.name == f"127.0.0.1:{r.p.port}"]
        r.p.is_ready = False
        await until(lambda: not worker.is_routable)
        assert (await r.post(STREAM))[0] == 200
        assert b'pd_fallback_total{reason="no_prefill_engine"} 1.0' in (await r.get("/metrics"))[2]


async def test_no_slot_and_a_full_queue_answer_429() -> None:
    async with rig(admission={"max_concurrent": 1, "max_queued": 1, "queue_timeout_s": 0.05}) as r:
        r.p.script(COMPLETIONS, mock.hangs)
        async with aiohttp.ClientSession() as session:
            first = asyncio.ensure_future(session.post(r.url + COMPLETIONS, json=STREAM))
            await r.p.arrived.wait()
            answers = [asyncio.ensure_future(r.post(STREAM)) for _ in range(2)]
            results = [await answer for answer in answers]
            first.cancel()
        assert [status for status, _, _ in results] == [429, 429]
        assert all("Retry-After" in headers for _, headers, _ in results)
        await drained(r)
        assert (await r.post(STREAM))[0] == 200

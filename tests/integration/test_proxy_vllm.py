"""The proxy in front of plain vLLM engines: a warm-up request prepares D, where it is worth its price."""

import json
from collections.abc import Callable

import pytest
from aiohttp import web

from proxy.fleet.worker import Role, Worker, WorkerState
from tests.support import mock_engine as mock
from tests.support.proxy_rig import Rig, rig, until

COMPLETIONS = "/v1/completions"
ASKED = {"model": "m", "prompt": "x", "stream": True, "structured_outputs": {"regex": "a+"}}


def decode_worker(r: Rig) -> Worker:
    return r.services.fleet.routable(Role.DECODE)[0]


def answers_once(holds: Callable[[], object]) -> mock.Script:
    """P's answer comes when something has happened."""

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        await until(lambda: bool(holds()))
        return mock.prefilled()

    return script


async def test_a_vllm_pair_is_prepared_by_a_warm_up_and_asked_without_stops() -> None:
    async with rig(dialect="vllm", warm_up_min_bytes=0) as r:
        r.p.always[COMPLETIONS] = answers_once(lambda: decode_worker(r).warmed)
        assert (await r.post({**ASKED, "stop": ["."]}, headers={"X-Request-Id": "same"}))[0] == 200
        warm_up, decode = sorted(r.d.calls(), key=lambda call: "kv_transfer_params" in call.json)
        assert warm_up.path == COMPLETIONS
        assert (warm_up.json["max_tokens"], warm_up.json["structured_outputs"]) == (1, {"regex": "a+"})
        assert "X-Request-Id" not in warm_up.headers
        assert decode.json["stop"] == ["."]
        assert "stop" not in r.p.calls()[0].json
        assert r.p.calls()[0].json["ignore_eos"] is True
        ids = {call.headers["X-Request-Id"] for call in (r.p.calls()[0], decode)}
        assert len(ids) == 1
        assert ids != {"same"}  # vLLM takes the header for its own request id, which must not repeat


async def test_a_vllm_engine_is_warmed_up_once_per_constraint_until_it_was_found_dead() -> None:
    async with rig(dialect="vllm", warm_up_min_bytes=0) as r:
        r.p.always[COMPLETIONS] = answers_once(lambda: decode_worker(r).warmed)

        async def num_warm_ups() -> int:
            assert (await r.post(ASKED))[0] == 200
            return sum("kv_transfer_params" not in call.json for call in r.d.calls())

        assert [await num_warm_ups() for _ in range(2)] == [1, 1]
        worker = decode_worker(r)
        worker.move_to(WorkerState.DEAD)
        await until(lambda: worker.is_routable)
        assert await num_warm_ups() == 2


async def test_a_constraint_that_compiles_faster_than_a_request_runs_gets_no_warm_up() -> None:
    async with rig(dialect="vllm", warm_up_min_bytes=200) as r:
        assert (await r.post(ASKED))[0] == 200
        assert len(r.d.calls()) == 1
        r.p.always[COMPLETIONS] = answers_once(lambda: decode_worker(r).warmed)
        assert (await r.post({**ASKED, "structured_outputs": {"regex": "a" * 200}}))[0] == 200
        assert len(r.d.calls()) == 3


async def begins(request: web.Request, body: bytes) -> web.StreamResponse:
    """The head of a stream, as vLLM sends it before anything is compiled; then nothing."""
    await (await mock.begin_stream(request)).write(b": \n\n")
    return await mock.hangs(request, body)


async def test_a_warm_up_has_done_its_work_a_moment_after_the_head_of_the_answer_and_is_dropped() -> None:
    async with rig(dialect="vllm", warm_up_min_bytes=0, timeouts={"warm_up_s": 0.01}) as r:
        r.d.script(COMPLETIONS, begins)
        r.p.always[COMPLETIONS] = answers_once(lambda: r.d.num_cancelled)
        assert [(await r.post(ASKED))[0] for _ in range(2)] == [200, 200]
        assert len(r.d.calls()) == 3, "one warm-up and two decode legs"


async def test_a_warm_up_that_has_no_answer_yet_is_kept_until_the_decode_leg_goes_out() -> None:
    async with rig(dialect="vllm", warm_up_min_bytes=0, timeouts={"warm_up_s": 0.01}) as r:
        r.d.script(COMPLETIONS, mock.hangs)
        r.p.always[COMPLETIONS] = answers_once(r.d.calls)
        assert (await r.post(ASKED))[0] == 200
        await r.d.cancelled.wait()
        assert len(decode_worker(r).warmed) == 0


@pytest.mark.parametrize(("code", "status"), [(400, 400), (500, 200)])
async def test_a_refusal_inside_the_stream_of_a_warm_up_ends_the_request_if_it_is_about_the_constraint(
    code: int, status: int
) -> None:
    async def refuses(request: web.Request, body: bytes) -> web.StreamResponse:
        said = {"error": {"message": "unclosed group", "type": "BadRequestError", "param": None, "code": code}}
        return await mock.stream(request, [b"data: " + json.dumps(said).encode() + b"\n\n"])

    async with rig(dialect="vllm", warm_up_min_bytes=0, timeouts={"warm_up_s": 60}) as r:
        r.d.script(COMPLETIONS, refuses)
        preparing = r.services.metrics.legs.counts
        p_goes_on = answers_once(lambda: (("prepare", "refused"), 1) in preparing())
        r.p.always[COMPLETIONS] = mock.hangs if status == 400 else p_goes_on
        answer = await r.post(ASKED)
        assert answer[0] == status
        assert (b"unclosed group" in answer[2]) is (status == 400)
        assert len(decode_worker(r).warmed) == 0

"""The proxy's HTTP surface beside generation: readiness, models, errors, limits, keys towards engines."""

import gzip
import json
from typing import Any

import pytest

from tests.support import mock_engine as mock
from tests.support.proxy_rig import rig

BASE: dict[str, Any] = {"model": "m", "prompt": "x"}


async def test_until_engines_are_ready_every_request_is_told_to_come_back() -> None:
    async with rig(wait=False) as r:
        for status, headers, body in (
            await r.post(BASE),
            await r.post({**BASE, "stream": True}),
            await r.get("/ready"),
            await r.get("/v1/models"),
            await r.post({"prompt": "x"}, "/tokenize"),
        ):
            assert status == 503
            assert int(headers["Retry-After"]) >= 1
            assert json.loads(body)["error"]["code"] == "not_ready"
        assert (await r.get("/health"))[0] == 200
        r.p.is_ready = r.d.is_ready = True
        await r.services.fleet.wait_ready()
        assert (await r.get("/ready"))[0] == 200
        assert (await r.post(BASE))[0] == 200


async def test_the_model_list_is_the_engines_own() -> None:
    async with rig(num_decode=2) as r:
        _, _, body = await r.get("/v1/models")
        assert [card["id"] for card in json.loads(body)["data"]] == ["m"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nope", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
    ],
)
async def test_unknown_paths_and_methods_are_openai_errors(method: str, path: str, status: int) -> None:
    async with rig() as r, r.session.request(method, r.url + path) as answer:
        error = json.loads(await answer.read())["error"]
        assert answer.status == status
        assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"x"', b'{"a":1,}', b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000]
)
async def test_a_body_that_is_no_json_object_is_a_400(body: bytes) -> None:
    async with rig() as r:
        status, _, answer = await r.post(body)
        assert (status, json.loads(answer)["error"]["type"]) == (400, "invalid_request_error")
        assert not r.p.calls()


async def test_large_bodies_pass_and_larger_than_the_cap_are_413() -> None:
    async with rig(max_body_bytes=4_000_000) as r:
        assert (await r.post({**BASE, "prompt": "x" * 3_000_000}))[0] == 200
        status, _, body = await r.post({**BASE, "prompt": "x" * 5_000_000})
        assert (status, json.loads(body)["error"]["code"]) == (413, "payload_too_large")


async def test_compressed_bodies_are_accepted_and_capped_by_their_real_size() -> None:
    async with rig(max_body_bytes=1_000_000) as r:
        headers = {"Content-Encoding": "gzip"}
        assert (await r.post(gzip.compress(json.dumps(BASE).encode()), headers=headers))[0] == 200
        assert r.d.calls()[0].json["prompt"] == "x"
        bomb = gzip.compress(b'{"prompt":"' + b"x" * 20_000_000 + b'"}')
        assert (await r.post(bomb, headers=headers))[0] == 413
        assert (await r.post(b"not gzip", headers=headers))[0] == 400


async def test_a_compressed_body_may_have_several_members_which_count_together() -> None:
    async with rig(max_body_bytes=1_000) as r:
        headers, body = {"Content-Encoding": "gzip"}, json.dumps(BASE).encode()
        members = gzip.compress(body[:7]) + gzip.compress(body[7:])
        assert (await r.post(members, headers=headers))[0] == 200
        assert r.p.calls()[0].json["prompt"] == r.d.calls()[0].json["prompt"] == "x"
        assert (await r.post(members + gzip.compress(b" " * 1_000), headers=headers))[0] == 413
        assert (await r.post(members + b"rest", headers=headers))[0] == 400


async def test_engines_with_a_key_are_probed_with_it_and_asked_with_it() -> None:
    async with rig(api_key="k1", engine_api_key="k1") as r:
        status, _, _ = await r.post(BASE, headers={"Authorization": "Bearer mine"})
        assert status == 200
        assert r.p.calls()[0].headers["Authorization"] == "Bearer k1"


async def test_a_401_of_an_engine_is_a_401_and_marks_nobody_dead() -> None:
    async with rig() as r:
        r.p.script("/v1/completions", mock.answers(401, "wrong key"))
        status, _, body = await r.post(BASE, headers={"Authorization": "Bearer wrong"})
        assert (status, json.loads(body)["error"]["message"]) == (401, "wrong key")
        assert all(worker.is_routable for worker in r.services.fleet.all())


async def test_tokenize_is_an_engines_answer() -> None:
    async with rig() as r:
        status, _, body = await r.post({"prompt": "x"}, "/tokenize")
        assert (status, json.loads(body)["tokens"]) == (200, [1, 2, 3])


async def test_metrics_hold_the_ttft_and_its_parts() -> None:
    async with rig() as r:
        for _ in range(10):
            await r.post({**BASE, "stream": True})
        text = (await r.get("/metrics"))[2].decode()
        assert 'pd_ttft_seconds_count{kind="free"} 10.0' in text
        for stage in ("front", "queue_p", "prefill", "handoff", "grammar_d", "queue_d", "pull", "first", "return"):
            assert f'pd_ttft_stage_seconds_count{{kind="free",stage="{stage}"}} 10.0' in text

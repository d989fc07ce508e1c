"""Every failure has its status, its OpenAI body and its place in time."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest

from common.errors import (
    Bug,
    ContextLengthExceeded,
    EngineError,
    GrammarDesynced,
    InvalidRequest,
    NoTokenAllowed,
    NotReady,
    PDError,
    PeerDisconnected,
    QueueFull,
    TransferTimedOut,
)
from tests.support.serving_rig import Rig, serving_rig

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
BASE = {"model": "m", "messages": MESSAGES, "max_tokens": 8}


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with serving_rig() as running:
        yield running


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content[0]"),
        ({"model": "other"}, 404, "model"),
        ({"temperature": -5}, 400, "temperature"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"n": 0, "stream": True}, 400, "n"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 257}, 400, "max_tokens"),
        ({"max_tokens": 257, "stream": True}, 400, "max_tokens"),
        ({"stop_token_ids": [999999]}, 400, "stop_token_ids"),
        ({"logit_bias": {"abc": 1}}, 400, "logit_bias"),
        ({"top_logprobs": 2}, 400, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 99}, 400, None),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
        ({"response_format": {"type": "yaml"}}, 400, "response_format.type"),
        ({"structured_outputs": {"grammar": "nonsense"}}, 400, "structured_outputs.grammar"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"chat_template": "{{ 1 }}"}, 400, "chat_template"),
        *(
            ({"chat_template_kwargs": {name: True}}, 400, f"chat_template_kwargs.{name}")
            for name in ("add_generation_prompt", "continue_final_message", "messages", "tokenize", "tools", "self")
        ),
        ({"functions": []}, 400, "functions"),
        ({"modalities": ["audio"]}, 400, "modalities"),
        ({"best_of": 3}, 400, "best_of"),
        ({"use_beam_search": True}, 400, "use_beam_search"),
        ({"continue_final_message": True}, 400, "continue_final_message"),
    ],
)
async def test_a_bad_field_is_named_before_anything_runs(rig: Rig, fields: dict, status: int, param: str | None):
    answer = await rig.post(CHAT, {**BASE, **fields})
    assert answer.status == status
    error = answer.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    if param is not None:
        assert error["param"] == param
    assert error["message"]
    assert rig.engine.requests == []


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', 400),
        (b'{"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "unknown": "\xff"}', 400),
        (b'{"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "unknown": ' + b"[" * 9999 + b"}", 400),
        (b'{"prompt": "' + b"x" * 300 + b'"}', 400),
    ],
)
async def test_a_body_that_is_no_request_is_a_400(rig: Rig, body: bytes, status: int):
    for path in (CHAT, COMPLETIONS):
        assert (await rig.post(path, body)).status == status


@pytest.mark.parametrize(
    ("prompt", "param"),
    [("", "prompt"), ([], "prompt"), ([[]], "prompt"), ([1, "a"], "prompt"), ([999], "prompt"), ([-1], "prompt")],
)
async def test_a_prompt_without_meaning_is_refused(rig: Rig, prompt: object, param: str):
    answer = await rig.post(COMPLETIONS, {"prompt": prompt})
    assert (answer.status, answer.json["error"]["param"]) == (400, param)


async def test_unknown_fields_are_tolerated(rig: Rig):
    assert (await rig.post(CHAT, {**BASE, "frobnicate": 1, "user": "u", "store": False})).status == 200


FAILURES: list[tuple[PDError, int, str]] = [
    (InvalidRequest("no", "seed"), 400, "invalid_request"),
    (ContextLengthExceeded("long"), 400, "context_length_exceeded"),
    (QueueFull("full"), 429, "queue_full"),
    (NotReady("closed"), 503, "not_ready"),
    (PeerDisconnected("gone"), 502, "kv_transfer_failed"),
    (TransferTimedOut("late"), 502, "kv_transfer_failed"),
    (EngineError("broke"), 500, "engine_failed"),
    (NoTokenAllowed("none"), 500, "engine_failed"),
    (GrammarDesynced("desync"), 500, "engine_failed"),
    (Bug("secret inside"), 500, "internal_error"),
]


@pytest.mark.parametrize(("error", "status", "code"), FAILURES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_token_is_a_real_status(
    rig: Rig, error: PDError, status: int, code: str, stream: bool
):
    rig.engine.fail_after, rig.engine.error = 0, error
    answer = await rig.post(CHAT, {**BASE, "stream": stream})
    assert (answer.status, answer.json["error"]["code"]) == (status, code)
    assert ("Retry-After" in answer.headers) == (status in (429, 503))
    assert "secret" not in answer.body.decode()


async def test_a_failure_after_the_first_token_is_an_error_event_and_no_end_marker(rig: Rig):
    rig.engine.fail_after, rig.engine.error = 2, EngineError("it broke")
    answer = await rig.post(CHAT, {**BASE, "stream": True})
    assert answer.status == 200
    *chunks, last = answer.events
    assert last["error"]["message"] == "it broke"
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])


async def test_a_failure_after_the_first_token_of_a_whole_answer_is_a_status(rig: Rig):
    rig.engine.fail_after, rig.engine.error = 2, EngineError("it broke")
    assert (await rig.post(CHAT, BASE)).status == 500


async def test_one_failed_prompt_ends_the_others(rig: Rig):
    rig.engine.fail_after, rig.engine.error = 2, EngineError("it broke")
    assert (await rig.post(COMPLETIONS, {"prompt": ["a", "b"]})).status == 500


async def test_unknown_paths_and_methods_answer_in_openai_s_form(rig: Rig):
    for path in ("/v1/responses", "/v1/embeddings", "/nope"):
        answer = await rig.post(path, {})
        assert (answer.status, answer.json["error"]["code"]) == (404, "not_found")
    answer = await rig.get(CHAT)
    assert (answer.status, answer.json["error"]["code"]) == (405, "method_not_allowed")


async def test_a_body_over_the_cap_is_a_413():
    async with serving_rig(max_body_bytes=1000) as rig:
        answer = await rig.post(CHAT, {**BASE, "user": "x" * 2000})
        assert (answer.status, answer.json["error"]["code"]) == (413, "payload_too_large")


async def test_bodies_of_megabytes_are_taken():
    async with serving_rig() as rig:
        answer = await rig.post(CHAT, {**BASE, "user": "x" * (3 << 20)})
        assert answer.status == 200


async def test_without_the_key_only_probes_are_answered():
    async with serving_rig(api_key="k1") as rig:
        assert (await rig.post(CHAT, BASE)).status == 401
        assert (await rig.post(CHAT, BASE, {"Authorization": "Bearer k2"})).status == 401
        assert (await rig.post(CHAT, BASE, {"Authorization": "Bearer k1"})).status == 200
        for path in ("/health", "/ready", "/metrics"):
            assert (await rig.get(path)).status == 200


async def test_while_the_model_loads_only_health_is_well():
    async with serving_rig(opened=False) as rig:
        assert (await rig.get("/health")).status == 200
        for answer in (await rig.get("/ready"), await rig.get("/v1/models"), await rig.post(CHAT, BASE)):
            assert answer.status == 503
            assert answer.headers["Retry-After"] == "1"
        assert (await rig.get("/metrics")).status == 200


async def test_a_draining_engine_takes_nothing_new(rig: Rig):
    rig.surface.drain()
    rig.surface.drain()
    assert (await rig.get("/ready")).status == 503
    assert (await rig.post(CHAT, BASE)).status == 503
    assert (await rig.get("/health")).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_aborts_its_request(rig: Rig, stream: bool):
    rig.engine.gate = asyncio.Event()
    with pytest.raises(asyncio.TimeoutError):
        async with (
            asyncio.timeout(0.5),
            rig.session.post(rig.url + CHAT, json={**BASE, "stream": stream}) as response,
        ):
            await response.read()
    async with asyncio.timeout(5):
        await rig.engine.departures.acquire()
    assert rig.engine.left == [rig.engine.requests[0].request_id]
    rig.engine.gate = None
    assert (await rig.post(CHAT, BASE)).status == 200


async def test_a_client_that_leaves_a_list_of_prompts_aborts_all_of_them(rig: Rig):
    rig.engine.gate = asyncio.Event()
    async with aiohttp.ClientSession() as session, asyncio.timeout(10):
        task = asyncio.ensure_future(session.post(rig.url + COMPLETIONS, json={"prompt": ["a", "b", "c"]}))
        for _ in range(3):
            await rig.engine.arrivals.acquire()
        task.cancel()
        await asyncio.wait({task})
        for _ in range(3):
            await rig.engine.departures.acquire()
    assert sorted(rig.engine.left) == sorted(r.request_id for r in rig.engine.requests)

"""Timing, metrics, prepare, tokenizer and model routes."""

from collections.abc import AsyncIterator

import pytest

from common.wire import timing
from tests.support.serving_rig import Rig, serving_rig

CHAT = "/v1/chat/completions"
BASE = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "r", "schema": {"type": "object"}}}}
NONSENSE = {"response_format": {"type": "json_schema", "json_schema": {"name": "r", "schema": {"type": "nonsense"}}}}
STAGES = {"front": 0.25, "schedule": 0.25, "compute": 0.5, "answer": 0.0}


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with serving_rig() as running:
        yield running


async def test_the_timing_header_of_a_stream_covers_the_first_token_and_no_more(rig: Rig):
    answer = await rig.post(CHAT, {**BASE, "stream": True})
    assert timing.decode(answer.headers[timing.HEADER]) == STAGES


async def test_the_timing_header_of_an_answer_in_one_piece_sets_apart_what_came_after_the_first_token(rig: Rig):
    rig.engine.step_s = 0.125
    answer = await rig.post(CHAT, BASE)
    assert timing.decode(answer.headers[timing.HEADER]) == {**STAGES, "decode": 5 * 0.125}
    one_token = await rig.post(CHAT, {**BASE, "max_tokens": 1})
    assert timing.decode(one_token.headers[timing.HEADER]) == {**STAGES, "decode": 0.0}


async def test_a_timeline_comes_on_request_in_the_last_chunk_or_the_body(rig: Rig):
    expected = {name: seconds * 1000 for name, seconds in STAGES.items()}
    whole = (await rig.post(CHAT, {**BASE, "timeline": True})).json["timeline"]
    assert whole["stages_ms"] == expected
    assert whole["events_ms"]["received"] == 0.0
    assert whole["events_ms"]["first_token"] == 1000.0
    *chunks, last, _ = (await rig.post(CHAT, {**BASE, "timeline": True, "stream": True})).events
    assert last["timeline"]["stages_ms"] == expected
    assert last["choices"] == []
    assert all("timeline" not in chunk for chunk in chunks)
    assert "timeline" not in (await rig.post(CHAT, BASE)).json


async def test_a_client_s_request_id_is_a_label_that_comes_back(rig: Rig):
    first = await rig.post(CHAT, BASE, {"X-Request-Id": "mine"})
    second = await rig.post(CHAT, BASE, {"X-Request-Id": "mine"})
    assert first.headers["X-Request-Id"] == second.headers["X-Request-Id"] == "mine"
    ids = [request.request_id for request in rig.engine.requests]
    assert len(set(ids)) == 2
    assert "mine" not in ids


async def test_time_to_first_token_is_counted_by_kind(rig: Rig):
    await rig.post(CHAT, BASE)
    await rig.post(CHAT, {**BASE, "stream": True, "response_format": {"type": "json_object"}})
    await rig.post(CHAT, {**BASE, "temperature": -1})
    text = (await rig.get("/metrics")).body.decode()
    assert 'pd_ttft_seconds_count{kind="free"} 1.0' in text
    assert 'pd_ttft_seconds_count{kind="json"} 1.0' in text
    assert 'pd_ttft_stage_seconds_sum{kind="free",stage="compute"} 0.5' in text
    assert f'pd_requests_total{{route="{CHAT}",status="200"}} 2.0' in text
    assert f'pd_requests_total{{route="{CHAT}",status="400"}} 1.0' in text


async def test_prepare_answers_when_the_grammar_is_ready(rig: Rig):
    first = await rig.post("/prepare", {"model": "m", **SCHEMA})
    second = await rig.post("/prepare", {"model": "m", **SCHEMA})
    assert first.status == 200
    assert first.json == {"state": "ready", "backend": "fake", "compile_ms": 12.5, "key": second.json["key"]}
    other = await rig.post("/prepare", {"model": "m", "structured_outputs": {"regex": "a+"}})
    assert other.json["key"] != first.json["key"]


@pytest.mark.parametrize(
    ("fields", "status", "word"),
    [
        (NONSENSE, 400, "nonsense does not compile"),
        ({"structured_outputs": {"grammar": "nonsense"}}, 400, "nonsense at the door"),
        ({}, 400, "no constraint"),
        ({"model": "other", **SCHEMA}, 404, "other"),
        ({"structured_outputs": {"regex": ""}}, 400, "empty"),
    ],
)
async def test_what_cannot_be_prepared_says_why(rig: Rig, fields: dict, status: int, word: str):
    answer = await rig.post("/prepare", fields)
    assert answer.status == status
    assert word in answer.json["error"]["message"]


async def test_a_forced_tool_is_prepared_as_the_request_will_ask_for_it(rig: Rig):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    fields = {"tools": [tool], "tool_choice": "required"}
    assert (await rig.post("/prepare", fields)).status == 200
    await rig.post(CHAT, {**BASE, **fields})
    assert rig.engine.requests[0].constraint == rig.grammars.tickets[0].constraint


async def test_models_lists_the_served_one(rig: Rig):
    assert (await rig.get("/v1/models")).json == {
        "object": "list",
        "data": [
            {
                "id": "m",
                "object": "model",
                "created": 1_700_000_000,
                "owned_by": "pd-serve",
                "root": "m.gguf",
                "parent": None,
                "max_model_len": 256,
            }
        ],
    }


async def test_ready_says_who_answers(rig: Rig):
    assert (await rig.get("/ready")).json == {"status": "ready", "model": "m", "role": "decode", "engine_id": "e-1"}


async def test_an_engine_whose_threads_died_is_neither_ready_nor_healthy(rig: Rig):
    rig.engine.is_alive = False
    assert [(await rig.get(path)).status for path in ("/health", "/ready", "/metrics")] == [500, 503, 200]
    assert (await rig.post(CHAT, BASE)).status == 503


async def test_tokenize_and_detokenize_are_each_other_s_inverse(rig: Rig):
    tokens = (await rig.post("/tokenize", {"model": "m", "prompt": "hé", "return_token_strs": True})).json
    assert tokens == {"count": 3, "max_model_len": 256, "tokens": list("hé".encode()), "token_strs": ["h", "�", "�"]}
    assert (await rig.post("/detokenize", {"model": "m", "tokens": tokens["tokens"]})).json == {"prompt": "hé"}


async def test_tokenize_renders_a_conversation_as_chat_does(rig: Rig):
    tokens = (await rig.post("/tokenize", {"messages": BASE["messages"]})).json["tokens"]
    await rig.post(CHAT, BASE)
    assert tuple(tokens) == rig.engine.requests[0].prompt_token_ids


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"model": "other", "prompt": "a"}, 404),
        ("/tokenize", {"messages": []}, 400),
        ("/detokenize", {"tokens": [10**6]}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": "a"}, 400),
    ],
)
async def test_bad_questions_to_the_tokenizer_are_refused(rig: Rig, path: str, body: dict, status: int):
    assert (await rig.post(path, body)).status == status


async def test_long_texts_are_tokenised_like_short_ones():
    async with serving_rig() as rig:
        text = "ab" * 20_000
        assert (await rig.post("/tokenize", {"prompt": text})).json["count"] == 40_000
        answer = await rig.post("/tokenize", {"messages": [{"role": "user", "content": text}]})
        assert answer.json["count"] > 40_000

"""Real schemas through P/D: every answer parses and validates, P compiles nothing, D pulls only behind its grammar."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import jsonschema
import pytest

from tests.support.trio import Trio, shared_schemas

pytestmark = pytest.mark.slow

WANTED = 100
CONCURRENCY = 8
# A 135M model does not always close its strings: temperature, penalties and another seed help it to an end.
ATTEMPTS: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "max_tokens": 400},
    {"temperature": 1.0, "seed": 1, "frequency_penalty": 1.0, "max_tokens": 800},
    {"temperature": 1.0, "seed": 2, "frequency_penalty": 1.5, "presence_penalty": 0.5, "max_tokens": 1500},
    {"temperature": 1.5, "seed": 3, "max_tokens": 2500},
)


def request_of(schema: dict[str, Any], attempt: dict[str, Any]) -> dict[str, Any]:
    shown = json.dumps(schema)[:1500]
    return {
        "model": "smollm2",
        "messages": [{"role": "user", "content": f"Give one very short JSON example for this schema:\n{shown}"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "r", "schema": schema}},
        **attempt,
    }


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=200)) as opened:
        yield opened


async def answer_one(session: aiohttp.ClientSession, url: str, schema: dict[str, Any]) -> str:
    """'refused', 'valid', or what went wrong."""
    for attempt in ATTEMPTS:
        async with session.post(url + "/v1/chat/completions", json=request_of(schema, attempt)) as response:
            answer = await response.json()
            if response.status == 400:
                assert answer["error"]["message"], answer
                return "refused"
            assert response.status == 200, answer
        choice = answer["choices"][0]
        if choice["finish_reason"] == "length":
            continue
        value = json.loads(choice["message"]["content"])
        try:
            jsonschema.validate(value, schema)
        except jsonschema.ValidationError as error:
            return f"invalid: {error.message} in {choice['message']['content']}"
        return "valid"
    return "never ended"


@pytest.mark.timeout(900)
async def test_answers_validate_for_every_real_schema_that_compiles(trio: Trio, session: aiohttp.ClientSession) -> None:
    rows = iter(shared_schemas())
    results: dict[str, str] = {}

    async def work() -> None:
        for row in rows:
            if sum(result == "valid" for result in results.values()) >= WANTED:
                return
            results[row["name"]] = await answer_one(session, trio.url("proxy"), row["schema"])

    async with asyncio.TaskGroup() as group:
        for _ in range(CONCURRENCY):
            group.create_task(work())
    bad = {name: result for name, result in results.items() if result not in ("valid", "refused")}
    assert not bad
    assert sum(result == "valid" for result in results.values()) >= min(WANTED, len(results) // 2)
    assert trio.total("prefill", "pd_grammar_compile_seconds_count") == 0
    assert trio.total("decode", "pd_grammar_compile_seconds_count") > 0


async def ask_prefill(session: aiohttp.ClientSession, trio: Trio, body: dict[str, Any]) -> dict[str, Any]:
    """What the proxy's prefill leg asks P; returns the reference it answers."""
    stripped = {key: value for key, value in body.items() if key != "response_format"}
    ask = {"do_remote_decode": True, "do_remote_prefill": False}
    leg = {**stripped, "max_tokens": 1, "kv_transfer_params": ask}
    async with session.post(trio.url("prefill") + "/v1/chat/completions", json=leg) as response:
        assert response.status == 200, await response.text()
        reference: dict[str, Any] = (await response.json())["kv_transfer_params"]
        return reference


async def test_decode_starts_no_pull_before_its_grammar_is_ready(trio: Trio, session: aiohttp.ClientSession) -> None:
    checked = 0
    for number in range(6):
        # Big and never seen before, so that the compile takes a while after D has been asked.
        names = {f"field_{number}_{i}": {"type": "string", "pattern": f"^[a-z]{{{i + 1},{i + 9}}}$"} for i in range(25)}
        schema = {"type": "object", "properties": names, "additionalProperties": False, "required": list(names)}
        body = request_of(schema, {"temperature": 0, "max_tokens": 4})
        reference = await ask_prefill(session, trio, body)
        leg = {**body, "kv_transfer_params": reference, "timeline": True}
        async with session.post(trio.url("decode") + "/v1/chat/completions", json=leg) as response:
            answer = await response.json()
            assert response.status == 200, answer
        events = answer["timeline"]["events_ms"]
        assert events["grammar_ready"] <= events["pull_started"] <= events["pull_done"] <= events["first_token"]
        checked += 1
    assert checked == 6

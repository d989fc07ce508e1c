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

CONCURRENCY = 12
# A 135M model does not always close its strings: a bias towards what closes helps it to an end, mildly at first, then
# so strongly that it closes wherever the grammar allows. What is tested is that every answer is valid.
ATTEMPTS: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "max_tokens": 192},
    {"temperature": 1.0, "seed": 1, "max_tokens": 768},
    {"temperature": 1.0, "seed": 2, "max_tokens": 2400},
)
MILD, STRONG = 8.0, 12.0
CLOSING: dict[str, float] = {  # piece -> weight; what ends a string goes first, or the rest would be text in it
    **dict.fromkeys(('"}', '"]', '"}}', '"]}', '"}]', '""'), 5.0),
    '"': 4.5,
    **dict.fromkeys(("}", "}}", "}}}", "]", "]}", "}]", "]]", "]}}", "[]", "{}"), 3.5),
    **dict.fromkeys(('",', '"},', '"],', ",", "},", "],"), 2.0),
}


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
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=400)) as opened:
        yield opened


async def closing_tokens(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Token id to weight, of the pieces of `CLOSING` that are one token each."""
    weights = {}
    for piece, weight in CLOSING.items():
        async with session.post(url + "/tokenize", json={"model": "smollm2", "prompt": piece}) as response:
            tokens = (await response.json())["tokens"]
            if len(tokens) == 1:
                weights[str(tokens[0])] = weight
    return weights


async def answer_one(
    session: aiohttp.ClientSession, url: str, schema: dict[str, Any], weights: dict[str, float]
) -> str:
    """'refused', 'valid', or what went wrong."""
    for attempt in ATTEMPTS:
        mild = attempt is ATTEMPTS[0]
        bias = {token: MILD if mild else STRONG * weight for token, weight in weights.items()}
        body = {**request_of(schema, attempt), "logit_bias": bias}
        async with session.post(url + "/v1/chat/completions", json=body) as response:
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
    return f"never ended: …{choice['message']['content'][-200:]}"


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("wanted", [10, pytest.param(100, marks=pytest.mark.long)])
async def test_answers_validate_for_every_real_schema_that_compiles(
    trio: Trio, session: aiohttp.ClientSession, wanted: int
) -> None:
    weights = await closing_tokens(session, trio.url("proxy"))
    rows = iter(shared_schemas())
    results: dict[str, str] = {}

    async def work() -> None:
        for row in rows:
            if len([result for result in results.values() if result != "refused"]) >= wanted:
                return
            results[row["name"]] = "asked"
            results[row["name"]] = await answer_one(session, trio.url("proxy"), row["schema"], weights)

    async with asyncio.TaskGroup() as group:
        for _ in range(CONCURRENCY):
            group.create_task(work())
    bad = {name: result for name, result in results.items() if result not in ("valid", "refused")}
    assert not bad
    assert sum(result == "valid" for result in results.values()) >= min(wanted, len(results) // 2)
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

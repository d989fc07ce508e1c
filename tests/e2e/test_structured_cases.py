"""Constraints that broke other systems, against P/D and against D alone."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from tests.support.trio import Trio

pytestmark = pytest.mark.slow

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BASE = {"model": "smollm2", "prompt": "The answer is", "max_tokens": 32, "temperature": 0}
TALK = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "write a poem"}],
    "max_tokens": 48,
    "temperature": 0,
}
X_IS_AN_INTEGER = {"type": "object", "properties": {"x": {"type": "integer", "maximum": 999}}, "required": ["x"]}
CLOSED = {**X_IS_AN_INTEGER, "additionalProperties": False}


def overlapping_one_of(depth: int) -> dict[str, Any]:
    node: dict[str, Any] = {"type": "string"}
    for level in range(depth):
        node = {"oneOf": [{"type": "string", "minLength": level}, {"type": "array", "items": node}, {"minLength": 2}]}
    return node


def tool(name: str) -> dict[str, Any]:
    query = {"type": "object", "properties": {"query": {"type": "string", "maxLength": 12}}, "required": ["query"]}
    return {"type": "function", "function": {"name": name, "parameters": {**query, "additionalProperties": False}}}


class Client:
    """One of the two ways in."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def ask(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        async with self._session.post(self._url + path, json=body) as response:
            return response.status, await response.json()

    async def text(self, outputs: dict[str, Any], **fields: Any) -> str:
        status, answer = await self.ask(COMPLETIONS, {**BASE, "structured_outputs": outputs, **fields})
        assert status == 200, answer
        assert answer["choices"][0]["finish_reason"] == "stop", answer
        text: str = answer["choices"][0]["text"]
        return text

    async def refusal(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        status, answer = await self.ask(path, body)
        assert status == 400, answer
        assert answer["error"]["message"]
        error: dict[str, Any] = answer["error"]
        return error

    async def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        async with self._session.post(self._url + path, json={**body, "stream": True}) as response:
            lines = (await response.text()).split("\n\n")
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@pytest.fixture(params=["proxy", "decode"])
async def client(trio: Trio, request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=100)) as session:
        yield Client(session, trio.url(request.param))


@pytest.mark.parametrize(
    ("outputs", "word"),
    [
        ({"grammar": 'root ::= "a"\nroot ::= "b"'}, "root"),
        ({"json": {"type": "array", "items": [{"type": "string"}, {"type": "number"}]}}, "items"),
        ({"json": overlapping_one_of(18)}, "oneOf"),
        ({"json": {"$ref": "#"}}, "no output"),
    ],
)
async def test_what_cannot_be_compiled_is_refused_by_field_and_nobody_else_notices(
    client: Client, trio: Trio, outputs: dict[str, Any], word: str
) -> None:
    assert await client.text({"choice": ["yes", "no"]}) in ("yes", "no")
    error = await client.refusal(COMPLETIONS, {**BASE, "structured_outputs": outputs})
    assert word in error["message"]
    assert error["param"] == f"structured_outputs.{next(iter(outputs))}"
    async with aiohttp.ClientSession() as session:
        for role in ("prefill", "decode"):
            async with session.get(trio.url(role) + "/health") as health:
                assert health.status == 200
    assert await client.text({"choice": ["yes", "no"]}) in ("yes", "no")


@pytest.mark.parametrize(
    "outputs",
    [
        {"json_object": False},
        {"json": ""},
        {"regex": ""},
        {"choice": []},
        {"grammar": ""},
        {},
        {"regex": "a", "choice": ["a"]},
    ],
)
async def test_what_is_set_but_empty_or_contradictory_is_refused(client: Client, outputs: dict[str, Any]) -> None:
    await client.refusal(COMPLETIONS, {**BASE, "structured_outputs": outputs})


async def test_a_response_format_of_text_constrains_nothing(client: Client) -> None:
    status, answer = await client.ask(CHAT, {**TALK, "max_tokens": 4, "response_format": {"type": "text"}})
    assert status == 200
    assert answer["choices"][0]["message"]["content"]


async def test_what_only_looks_explosive_is_served(client: Client) -> None:
    body = {**BASE, "structured_outputs": {"regex": "([ab]{1,400}){1,400}"}, "max_tokens": 6}
    status, answer = await client.ask(COMPLETIONS, body)
    assert status == 200
    assert set(answer["choices"][0]["text"]) <= {"a", "b"}


async def test_a_finished_grammar_ends_the_answer_whatever_min_tokens_says(client: Client) -> None:
    assert await client.text({"json": {"type": "boolean"}}, min_tokens=24) in ("true", "false")
    assert await client.text({"choice": ["a"]}, min_tokens=10) == "a"


async def test_a_stop_token_that_is_text_cannot_cut_the_json(client: Client) -> None:
    _, spelled = await client.ask("/tokenize", {"model": "smollm2", "prompt": "1"})
    stop = spelled["tokens"][0]
    text = await client.text({"json": CLOSED}, stop_token_ids=[stop], logit_bias={str(stop): 100.0})
    assert isinstance(json.loads(text)["x"], int)


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("temperature", [0, 1])
async def test_the_schema_is_obeyed_whatever_the_prompt_asks_for(
    client: Client, wrapped: bool, temperature: int
) -> None:
    schema = {"name": "r", "schema": CLOSED}
    wanted = {"type": "json_schema", "json_schema": schema} if wrapped else {"type": "json_schema", "schema": CLOSED}
    body = {**TALK, "response_format": wanted, "temperature": temperature, "seed": 1, "max_tokens": 200}
    status, answer = await client.ask(CHAT, body)
    assert status == 200
    assert isinstance(json.loads(answer["choices"][0]["message"]["content"])["x"], int)


@pytest.mark.parametrize("around", ["alone", "nested", "in an array"])
async def test_a_length_beside_a_pattern_or_a_format_is_kept(client: Client, around: str) -> None:
    for string, longest in (
        ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}, 3),
        ({"type": "string", "format": "email", "maxLength": 10}, 10),
    ):
        schema: dict[str, Any] = string
        if around == "nested":
            schema = {"type": "object", "properties": {"s": string}, "required": ["s"], "additionalProperties": False}
        elif around == "in an array":
            schema = {"type": "array", "items": string, "minItems": 1, "maxItems": 1}
        value = json.loads(await client.text({"json": schema}))
        found = value["s"] if isinstance(value, dict) else value[0] if isinstance(value, list) else value
        assert 0 < len(found) <= longest


async def test_without_parallel_calls_there_is_one_and_generation_stops(client: Client) -> None:
    body = {**TALK, "tools": [tool("search"), tool("look_up")], "tool_choice": "required"}
    status, answer = await client.ask(CHAT, {**body, "parallel_tool_calls": False, "max_tokens": 96})
    assert status == 200
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] in ("search", "look_up")
    assert set(json.loads(call["function"]["arguments"])) == {"query"}


def of_stream(events: list[dict[str, Any]]) -> tuple[str | None, str, list[str]]:
    """Finish reason, content, and name and arguments of each call, as a client puts them together."""
    finish, content, calls = None, "", []
    for choice in (choice for event in events for choice in event["choices"]):
        finish = choice["finish_reason"] or finish
        content += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls") or ():
            if call["index"] == len(calls):
                calls.append("")
            calls[call["index"]] += (call["function"].get("name") or "") + (call["function"].get("arguments") or "")
    return finish, content, calls


def of_whole(answer: dict[str, Any]) -> tuple[str | None, str, list[str]]:
    choice = answer["choices"][0]
    functions = [call["function"] for call in choice["message"].get("tool_calls") or ()]
    calls = [function["name"] + function["arguments"] for function in functions]
    return choice["finish_reason"], choice["message"]["content"] or "", calls


async def test_a_call_cut_anywhere_is_the_same_streamed_or_not_and_says_length(client: Client) -> None:
    body = {**TALK, "tools": [tool("search")], "tool_choice": "required", "stop": ["."], "parallel_tool_calls": False}

    async def both(max_tokens: int) -> None:
        cut = {**body, "max_tokens": max_tokens}
        status, answer = await client.ask(CHAT, cut)
        assert status == 200, answer
        whole = of_whole(answer)
        assert whole == of_stream(await client.events(CHAT, cut))
        is_cut = answer["usage"]["completion_tokens"] == max_tokens
        assert (whole[0] == "length") is is_cut, whole

    async with asyncio.TaskGroup() as group:
        for max_tokens in (4, 9, 14, 19, 24, 40, 96):
            group.create_task(both(max_tokens))

"""Drafts on D alone, with the real model over real NIXL: the same answers as from an engine that guesses nothing.

K14 (P and D differ in speculation), S5 (grammars and tool calls under drafts of five tokens).
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import pytest

from tests.support.trio import Trio, running_trio

pytestmark = pytest.mark.slow

GUESSING = {"method": "grammar+ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "disable_by_batch_size": 16}
PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "age_in_years": {"type": "integer", "minimum": 0, "maximum": 130},
        "is_a_resident": {"type": "boolean"},
    },
    "required": ["first_name", "age_in_years", "is_a_resident"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_current_weather",
        "parameters": {
            "type": "object",
            "properties": {"city_of_interest": {"type": "string", "maxLength": 12}},
            "required": ["city_of_interest"],
            "additionalProperties": False,
        },
    },
}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def guessing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    folder: Path = tmp_path_factory.mktemp("guessing")
    overrides = {
        "prefill": {"engine": {"speculative_config": {"method": "none"}}},
        "decode": {"engine": {"speculative_config": GUESSING}},
    }
    with running_trio(folder, overrides) as trio:
        yield trio


async def both(trio: Trio, path: str, body: dict[str, Any]) -> tuple[Any, Any]:
    """The answer through P and a guessing D, and that of P alone, which computes one token after the other."""
    timeout = aiohttp.ClientTimeout(total=100)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def ask(url: str) -> Any:
            async with session.post(url + path, json={"model": "smollm2", "seed": 5, **body}) as response:
                answer = await response.json()
                assert response.status == 200, answer
                return answer

        through, alone = await asyncio.gather(ask(trio.url("proxy")), ask(trio.url("prefill")))
    return through, alone


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 80, "temperature": 0, **fields}


@pytest.mark.parametrize("num_words", [4, 300, 1100])
async def test_a_prompt_of_any_length_is_answered_the_same_when_only_d_guesses(guessing: Trio, num_words: int) -> None:
    prompt = " ".join(f"word {number % 17}" for number in range(num_words // 2))
    before = guessing.total("decode", "pd_draft_tokens_total")
    through, alone = await both(guessing, "/v1/completions", {"prompt": prompt, "max_tokens": 48, "temperature": 0})
    assert through["choices"][0]["text"] == alone["choices"][0]["text"]
    assert through["usage"]["completion_tokens"] == alone["usage"]["completion_tokens"]
    assert num_words < 10 or guessing.total("decode", "pd_draft_tokens_total") > before


@pytest.mark.parametrize("temperature", [0, 0.8])
async def test_json_under_drafts_is_valid_and_the_same_token_for_token(guessing: Trio, temperature: float) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    asked = chat("Invent a person.", response_format=form, temperature=temperature, logprobs=True)
    through, alone = await both(guessing, CHAT, asked)
    ours, theirs = through["choices"][0], alone["choices"][0]
    assert ours["finish_reason"] == "stop"
    jsonschema.validate(json.loads(ours["message"]["content"]), PERSON)
    tokens = [[entry["token"] for entry in choice["logprobs"]["content"]] for choice in (ours, theirs)]
    assert tokens[0] == tokens[1]
    assert through["usage"]["completion_tokens"] == len(tokens[0]), "every token counts once"


async def test_any_object_and_a_required_tool_call_end_as_they_should(guessing: Trio) -> None:
    through, alone = await both(guessing, CHAT, chat("JSON, please.", response_format={"type": "json_object"}))
    assert through["choices"][0]["message"]["content"] == alone["choices"][0]["message"]["content"]
    if through["choices"][0]["finish_reason"] == "stop":
        assert isinstance(json.loads(through["choices"][0]["message"]["content"]), dict)
    asked = chat("The weather in Paris?", tools=[WEATHER], tool_choice="required")
    through, alone = await both(guessing, CHAT, asked)
    calls = [answer["choices"][0]["message"]["tool_calls"][0]["function"] for answer in (through, alone)]
    assert calls[0] == calls[1]
    assert set(json.loads(calls[0]["arguments"])) == {"city_of_interest"}
    assert through["choices"][0]["finish_reason"] == "tool_calls"


async def test_what_the_grammar_forces_is_guessed_right(guessing: Trio) -> None:
    before = guessing.metrics("decode")
    form = {"json": PERSON, "disable_any_whitespace": True}
    await both(guessing, CHAT, chat("Invent a person.", structured_outputs=form))
    after = guessing.metrics("decode")
    name = 'pd_draft_tokens_total{result="accepted"}'
    assert after[name] - before.get(name, 0) >= 8


async def test_seeded_choices_and_penalties_are_the_same_with_and_without_drafts(guessing: Trio) -> None:
    asked = chat("Count: one two three one two three one two three", n=2, temperature=1.0, frequency_penalty=0.7)
    through, alone = await both(guessing, CHAT, asked)
    said = [[choice["message"]["content"] for choice in answer["choices"]] for answer in (through, alone)]
    assert said[0] == said[1]

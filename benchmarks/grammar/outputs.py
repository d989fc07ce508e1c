"""Real answers to every schema of the sample, greedy and at temperature 1, through P/D; each validated on its own.

Owns: the requests, and what became of each. A small model does not always end: a bias towards what closes a string, an
object, an array helps it, mildly at first, then wherever the grammar allows. Does not know: which backend served it.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import aiohttp
import jsonschema
import jsonschema.validators

_CLOSING = {  # piece -> weight; what ends a string goes first, or the rest would be text in it
    **dict.fromkeys(('"}', '"]', '"}}', '"]}', '"}]', '""'), 5.0),
    '"': 4.5,
    **dict.fromkeys(("}", "}}", "}}}", "]", "]}", "}]", "]]", "]}}", "[]", "{}"), 3.5),
    **dict.fromkeys(('",', '"},', '"],', ",", "},", "],"), 2.0),
}
_MILD, _STRONG = 2.0, 12.0
_ATTEMPTS = ((_MILD, 160), (_STRONG, 1200))
"""Bias per weight and most tokens."""
VALID, REFUSED, ENDLESS = "valid", "refused", "no end in 1,200 tokens"
TEMPERATURES = {"greedy": 0.0, "temperature 1": 1.0}
_AT_ONCE = 16


async def answer_all(url: str, model: str, cases: Sequence[Mapping[str, Any]]) -> dict[str, Counter[str]]:
    """How many answers were `VALID`, `REFUSED`, `ENDLESS`, or what was wrong with them."""
    found = {name: Counter[str]() for name in TEMPERATURES}
    work = iter([(case, name) for case in cases for name in TEMPERATURES])
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        weights = await _weights(session, url, model)
        async with asyncio.TaskGroup() as group:
            for _ in range(_AT_ONCE):
                group.create_task(_work(work, found, session, (url, model, weights)))
    return found


async def _work(
    work: Iterator[tuple[Mapping[str, Any], str]],
    found: Mapping[str, Counter[str]],
    session: aiohttp.ClientSession,
    target: tuple[str, str, Mapping[str, float]],
) -> None:
    for case, name in work:
        result = await _answer(session, target, case["schema"], TEMPERATURES[name])
        if result not in (VALID, REFUSED, ENDLESS):
            result = f"{case.get('name', '?')}: {result}"
        found[name][result] += 1


async def _answer(
    session: aiohttp.ClientSession,
    target: tuple[str, str, Mapping[str, float]],
    schema: Mapping[str, Any],
    temperature: float,
) -> str:
    url, model, weights = target
    for strength, max_tokens in _ATTEMPTS:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "Give one very short example in JSON."}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "r", "schema": schema}},
            "temperature": temperature,
            "seed": 1,
            "max_tokens": max_tokens,
            "logit_bias": {token: strength * weight for token, weight in weights.items()},
        }
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            status, answer = response.status, await response.json()
        if status == 400:
            return REFUSED if answer["error"]["message"] else "refused without a reason"
        if status != 200:
            return f"status {status}: {answer}"
        choice = answer["choices"][0]
        if choice["finish_reason"] != "length":
            return verdict(choice["message"]["content"], schema)
    return ENDLESS


def verdict(text: str, schema: Mapping[str, Any]) -> str:
    """`VALID`, or what is wrong with `text`."""
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
    try:
        worst = jsonschema.exceptions.best_match(validator.iter_errors(json.loads(text)))
    except ValueError as error:
        return f"not JSON: {error}"
    return VALID if worst is None else f"invalid: {worst.message[:200]}"


async def _weights(session: aiohttp.ClientSession, url: str, model: str) -> dict[str, float]:
    """Token id to weight, of the pieces that are one token each."""
    weights = {}
    for piece, weight in _CLOSING.items():
        body = {"model": model, "prompt": piece, "add_special_tokens": False}
        async with session.post(f"{url}/tokenize", json=body) as response:
            tokens = (await response.json())["tokens"]
        if len(tokens) == 1:
            weights[str(tokens[0])] = weight
    return weights

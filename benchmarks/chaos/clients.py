"""What clients ask and how an answer is judged.

Owns: a fixed set of requests (greedy and seeded, free and structured), and the verdict on each answer.
"""

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.prompts import WORDS, random_words

SCHEMA = {
    "type": "object",
    "properties": {"word": {"enum": list(WORDS)}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["word", "n"],
    "additionalProperties": False,
}


def requests(model: str, num_requests: int, seed: int) -> list[dict[str, Any]]:
    """Bodies whose answers are functions of the body alone."""
    chance = random.Random(seed)
    bodies = []
    for number in range(num_requests):
        words = random_words(chance.choice((4, 20, 90)), chance)
        body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": words}], "max_tokens": 16}
        body |= {"temperature": 0} if number % 2 else {"temperature": 0.9, "seed": number}
        if number % 3 == 0:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
        bodies.append(body)
    return bodies


@dataclass
class Verdict:
    """Counts of how requests ended, what clean errors said, and every answer that was not as it must be."""

    outcomes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> str:
    """The text of a streamed answer; `error: …` for a well-formed error before or inside the stream.

    Raises:
        ValueError: the answer is malformed.
    """
    async with session.post(f"{url}/v1/chat/completions", json={**body, "stream": True}) as response:
        raw = await response.read()
        if response.status != 200:
            return f"error: {response.status} {json.loads(raw)['error']['message']}"
    text, is_done = "", False
    for event in raw.decode().split("\n\n"):
        data = event.strip().removeprefix("data: ")
        if data == "[DONE]":
            is_done = True
        elif data:
            chunk = json.loads(data)
            if "error" in chunk:
                return f"error: {chunk['error']['message']}"
            text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    if not is_done:
        raise ValueError(f"the stream ended without [DONE] and without an error: {raw[-200:]!r}")
    return text


async def one_client(
    url: str, bodies: list[dict[str, Any]], wanted: list[str], verdict: Verdict, ends: asyncio.Event, seed: int
) -> None:
    """Ask at random until `ends`; sometimes leave in the middle."""
    chance = random.Random(seed)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        while not ends.is_set():
            number = chance.randrange(len(bodies))
            patience_s = chance.uniform(0, 1.0) if chance.random() < 0.15 else None
            try:
                async with asyncio.timeout(patience_s):
                    text = await ask(session, url, bodies[number])
            except TimeoutError:
                verdict.outcomes["left" if patience_s else "never answered"] += 1
                if patience_s is None:
                    verdict.wrong.append(f"request {number} was not answered within 120 s")
                continue
            except (aiohttp.ClientError, ValueError, KeyError) as error:
                verdict.outcomes["malformed"] += 1
                verdict.wrong.append(f"request {number}: {error!r}")
                continue
            _judge(number, text, wanted[number], verdict)


def _judge(number: int, text: str, wanted: str, verdict: Verdict) -> None:
    if text.startswith("error: "):
        verdict.outcomes["clean error"] += 1
        verdict.errors[text] += 1
    elif text == wanted:
        verdict.outcomes["right"] += 1
    else:
        verdict.outcomes["wrong"] += 1
        verdict.wrong.append(f"request {number}: {text!r} instead of {wanted!r}")

"""P/D output equals unsplit output, token for token, and D computes next to nothing of the prompt itself."""

import random
from typing import Any

import pytest

from tests.support.trio import Trio, post_json

pytestmark = pytest.mark.slow

BLOCK = 16
LENGTHS = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK - 1, 5 * BLOCK, 5 * BLOCK + 1, 300, 33 * BLOCK + 1]


def prompt_of(length: int, seed: int) -> list[int]:
    """Random word-like ids, never a special token (those are below 17 in the default model)."""
    return random.Random(seed).choices(range(1000, 40000), k=length)


def ask(url: str, prompt: list[int], **fields: Any) -> dict[str, Any]:
    body = {
        "model": "smollm2",
        "prompt": prompt,
        "max_tokens": 8,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }
    status, answer, _ = post_json(url + "/v1/completions", body)
    assert status == 200, answer
    result: dict[str, Any] = answer
    return result


KINDS = ("greedy", "seeded")
CASES = [
    (length, kind, 10 * number + place)
    for number, length in enumerate(LENGTHS)
    for place, kind in enumerate((*KINDS, *KINDS))
]
SAMPLING = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": 1234},
}


@pytest.mark.parametrize(("length", "kind", "seed"), CASES)
def test_a_split_request_gives_the_tokens_of_an_unsplit_one_cold_and_warm(
    trio: Trio, length: int, kind: str, seed: int
) -> None:
    prompt, sampling = prompt_of(length, seed), SAMPLING[kind]
    before = trio.metrics("decode")
    cold = ask(trio.url("proxy"), prompt, **sampling)
    after = trio.metrics("decode")
    warm = ask(trio.url("proxy"), prompt, **sampling)
    unsplit = ask(trio.url("prefill"), prompt, **sampling)
    tokens = unsplit["choices"][0]["token_ids"]
    assert len(tokens) == 8
    assert cold["choices"][0]["token_ids"] == tokens
    assert warm["choices"][0]["token_ids"] == tokens
    key = 'pd_prompt_tokens_total{source="computed"}'
    assert after[key] - before.get(key, 0.0) <= BLOCK + 1
    if length > 1:
        pulled = 'pd_prompt_tokens_total{source="pulled"}'
        assert after[pulled] - before.get(pulled, 0.0) == length - 1


def test_text_and_usage_are_the_same_too(trio: Trio) -> None:
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Name three colours."}],
        "temperature": 0,
        "max_tokens": 24,
    }
    _, split, _ = post_json(trio.url("proxy") + "/v1/chat/completions", body)
    _, unsplit, _ = post_json(trio.url("decode") + "/v1/chat/completions", body)
    assert split["choices"][0]["message"] == unsplit["choices"][0]["message"]
    assert split["choices"][0]["finish_reason"] == unsplit["choices"][0]["finish_reason"]
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert split["usage"][count] == unsplit["usage"][count]

"""Requests that carry KV references between real engines, for e2e tests of KV transfer."""

import random
from typing import Any

from benchmarks.kv.pairs import ASK
from tests.support.kv_real import until
from tests.support.trio import Trio, post_json

COMPUTED, PULLED = 'pd_prompt_tokens_total{source="computed"}', 'pd_prompt_tokens_total{source="pulled"}'


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1000, 40000), k=length)


def complete(url: str, prompt: list[int], **fields: Any) -> dict[str, Any]:
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}
    status, answer, _ = post_json(url + "/v1/completions", body)
    assert status == 200, answer
    result: dict[str, Any] = answer
    return result


def text_of(url: str, prompt: list[int], **fields: Any) -> str:
    text: str = complete(url, prompt, **fields)["choices"][0]["text"]
    return text


def prefilled(trio: Trio, prompt: list[int]) -> dict[str, Any]:
    """Where P left the KV of the prompt."""
    answer = complete(trio.url("prefill"), prompt, max_tokens=1, kv_transfer_params=ASK)
    params: dict[str, Any] = answer["kv_transfer_params"]
    return params


def assert_p_holds_nothing(trio: Trio) -> None:
    until(lambda: trio.total("prefill", "pd_leases_held") == 0 and trio.total("prefill", "pd_kv_blocks_in_use") == 0)

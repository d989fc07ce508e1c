"""Requests that carry KV references between real engines, for e2e tests of KV transfer."""

import random
import time
from collections.abc import Callable
from typing import Any

from tests.support.trio import Trio, post_json

ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
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


def until(holds: Callable[[], bool], limit_s: float = 20.0) -> None:
    """Wait for a fact about another process, which can only be polled."""
    give_up_at = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < give_up_at, "it did not happen in time"
        time.sleep(0.05)


def assert_p_holds_nothing(trio: Trio) -> None:
    until(lambda: trio.total("prefill", "pd_leases_held") == 0 and trio.total("prefill", "pd_kv_blocks_in_use") == 0)

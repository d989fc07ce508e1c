"""References that were read, replayed, altered or refused, choices, block sizes that differ: against real engines."""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.trio import MODEL, Trio, post_json, running_trio

pytestmark = pytest.mark.slow
ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
BAD_SCHEMA = {"type": "json_schema", "json_schema": {"name": "r", "schema": {"type": "nonsense"}}}
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


def test_a_reference_used_twice_or_after_p_reused_the_blocks_never_changes_the_answer(trio: Trio) -> None:
    prompt = prompt_of(70, 1)
    params = prefilled(trio, prompt)
    first = text_of(trio.url("decode"), prompt, kv_transfer_params=params)
    again = text_of(trio.url("decode"), prompt, kv_transfer_params=params)
    for seed in (2, 3, 4):  # other prompts come to lie where it lay
        complete(trio.url("prefill"), prompt_of(70, seed))
    late = text_of(trio.url("decode"), prompt, kv_transfer_params=params)
    assert first == again == late == text_of(trio.url("prefill"), prompt)
    assert_p_holds_nothing(trio)


@pytest.mark.parametrize(
    "change",
    [
        {"remote_block_ids": [10**6] * 5},
        {"remote_block_ids": [0, 1, 2, 3, 4]},
        {"remote_block_ids": []},
        {"remote_engine_id": "somebody"},
        {"remote_port": 1},
        {"remote_host": "10.0.0.1"},
        {"lease_id": "1-00"},
        {"lease_ttl_s": 0},
    ],
    ids=lambda change: "-".join(f"{key}" for key in change),
)
def test_an_altered_reference_is_computed_instead_or_refused(trio: Trio, change: dict[str, Any]) -> None:
    prompt = prompt_of(70, 10)
    params = prefilled(trio, prompt)
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    status, answer, _ = post_json(
        trio.url("decode") + "/v1/completions", {**body, "kv_transfer_params": {**params, **change}}
    )
    if status == 200:
        assert answer["choices"][0]["text"] == text_of(trio.url("prefill"), prompt)
    else:
        assert 400 <= status < 500, answer
    text_of(trio.url("decode"), prompt, kv_transfer_params=params)  # the true one is not spoilt by it
    assert_p_holds_nothing(trio)


def test_schemas_that_only_d_compiles_cost_p_nothing(trio: Trio) -> None:
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "hi"}], "response_format": BAD_SCHEMA}
    for _ in range(20):
        status, answer, _ = post_json(trio.url("proxy") + "/v1/chat/completions", body)
        assert status == 400, answer
    assert_p_holds_nothing(trio)
    assert len(text_of(trio.url("proxy"), prompt_of(20, 20))) > 0


def test_four_choices_come_from_one_pull_and_p_frees_once(trio: Trio) -> None:
    released = 'pd_leases_released_total{cause="read"}'
    before = trio.metrics("prefill").get(released, 0.0)
    answer = complete(trio.url("proxy"), prompt_of(100, 30), n=4, temperature=1, seed=5)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in answer["choices"]}) > 1
    assert_p_holds_nothing(trio)
    assert trio.metrics("prefill")[released] - before == 1


@pytest.mark.long
@pytest.mark.timeout(400)
def test_engines_with_other_block_sizes_give_the_unsplit_answer_at_every_length(tmp_path: Path) -> None:
    if not MODEL.exists():
        pytest.skip(f"no default model at {MODEL}: run `make model`")
    with running_trio(tmp_path, {"decode": {"engine": {"block_size": 64}}}) as trio:
        for length in (1, 10, 63, 64, 65, 1000, 4000):
            prompt = prompt_of(length, 40 + length)
            before = trio.metrics("decode")
            split = text_of(trio.url("proxy"), prompt)
            after = trio.metrics("decode")
            assert split == text_of(trio.url("prefill"), prompt)
            assert after[COMPUTED] - before.get(COMPUTED, 0.0) <= 65
            assert after.get(PULLED, 0.0) - before.get(PULLED, 0.0) == length - 1
        assert_p_holds_nothing(trio)

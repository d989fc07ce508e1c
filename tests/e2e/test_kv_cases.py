"""References that were read, replayed, altered or refused, choices, block sizes that differ: against real engines."""

import json
import select
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.support.kv_real import until
from tests.support.kv_requests import (
    COMPUTED,
    PULLED,
    assert_p_holds_nothing,
    complete,
    prefilled,
    prompt_of,
    text_of,
)
from tests.support.trio import MODEL, Trio, post_json, running_trio

pytestmark = pytest.mark.slow
BAD_SCHEMA = {"type": "json_schema", "json_schema": {"name": "r", "schema": {"type": "nonsense"}}}


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
    blocks = trio.total("prefill", "pd_kv_blocks_in_use")
    for _ in range(200):
        status, answer, _ = post_json(trio.url("proxy") + "/v1/chat/completions", body)
        assert status == 400, answer
    assert_p_holds_nothing(trio)
    assert trio.total("prefill", "pd_kv_blocks_in_use") == blocks
    assert len(text_of(trio.url("proxy"), prompt_of(20, 20))) > 0


@pytest.mark.long
def test_p_is_told_at_once_of_references_whose_request_d_refuses(trio: Trio) -> None:
    """The lease is 30 s long, and each is gone before the next is asked for: no expiry helps."""
    body = {"model": "smollm2", "max_tokens": 8, "response_format": BAD_SCHEMA}
    for number in range(200):
        prompt = prompt_of(40, 1000 + number)
        params = prefilled(trio, prompt)
        leg = {**body, "prompt": prompt, "kv_transfer_params": params}
        status, answer, _ = post_json(trio.url("decode") + "/v1/completions", leg)
        assert status == 400, answer
        until(lambda: trio.total("prefill", "pd_leases_held") == 0, limit_s=2.0)
    assert_p_holds_nothing(trio)
    assert trio.metrics("prefill").get('pd_leases_released_total{cause="expired"}', 0.0) == 0
    assert len(text_of(trio.url("proxy"), prompt_of(20, 21))) > 0


def test_four_choices_come_from_one_pull_and_p_frees_once(trio: Trio) -> None:
    released = 'pd_leases_released_total{cause="read"}'
    before = trio.metrics("prefill").get(released, 0.0)
    answer = complete(trio.url("proxy"), prompt_of(100, 30), n=4, temperature=1, seed=5)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in answer["choices"]}) > 1
    assert_p_holds_nothing(trio)
    assert trio.metrics("prefill")[released] - before == 1


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("d_block_size", [16, 64])
def test_prompts_of_every_length_are_pulled_whole_and_answered_as_by_one_engine(
    tmp_path: Path, d_block_size: int
) -> None:
    if not MODEL.exists():
        pytest.skip(f"no default model at {MODEL}: run `make model`")
    engine = {"max_model_len_tokens": 8192, "kv_cache_bytes": 512 << 20}
    sections = {"prefill": {"engine": engine}, "decode": {"engine": {**engine, "block_size": d_block_size}}}
    with running_trio(tmp_path, sections) as trio:
        for length in (1, 10, 63, 64, 65, 1000, 4000, 8000):
            prompt = prompt_of(length, 40 + length)
            before = trio.metrics("decode")
            split = text_of(trio.url("proxy"), prompt)
            after = trio.metrics("decode")
            assert split == text_of(trio.url("prefill"), prompt)
            assert after[COMPUTED] - before.get(COMPUTED, 0.0) == 1  # the last token of the prompt
            assert after.get(PULLED, 0.0) - before.get(PULLED, 0.0) == length - 1
            assert trio.total("decode", "pd_fallback_total") == 0
        assert_p_holds_nothing(trio)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_clients_that_leave_while_their_p_is_dead_cost_d_no_block(tmp_path: Path) -> None:
    """Fifty times: P hands over, dies before D reads, D is asked, and the client leaves at some moment after that."""
    if not MODEL.exists():
        pytest.skip(f"no default model at {MODEL}: run `make model`")
    with running_trio(tmp_path, {"prefill": {"lease_ttl_s": 3.0}}, ("prefill", "decode")) as trio:
        wanted = text_of(trio.url("decode"), prompt_of(200, 49))
        for number in range(50):
            warm = prompt_of(40, 2000 + number)  # so that every other D is connected to the P that dies
            if number % 2:
                text_of(trio.url("decode"), warm, kv_transfer_params=prefilled(trio, warm))
            prompt = prompt_of(600, 3000 + number)
            params = prefilled(trio, prompt)
            trio.stop("prefill", signal.SIGKILL)
            leave_after(trio.url("decode"), prompt, params, patience_s=0.004 * number)
            until(
                lambda: trio.total("decode", "pd_requests_waiting") + trio.total("decode", "pd_requests_running") == 0
            )
            until(lambda: trio.total("decode", "pd_kv_blocks_in_use") == 0)
            trio.start("prefill")
            trio.wait_ready("prefill")
        assert trio.processes["decode"].poll() is None
        params = prefilled(trio, prompt_of(200, 49))
        assert text_of(trio.url("decode"), prompt_of(200, 49), kv_transfer_params=params) == wanted


def leave_after(url: str, prompt: list[int], params: dict[str, Any], patience_s: float) -> None:
    """Ask D, and break the connection off so much later, whatever has come by then."""
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 200, "ignore_eos": True, "stream": True}
    host, port = url.removeprefix("http://").split(":")
    data = json.dumps({**body, "kv_transfer_params": params}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: d\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + data)
        select.select([], [], [], patience_s)

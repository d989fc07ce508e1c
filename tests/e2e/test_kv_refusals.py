"""A P that lives and computes, and whose KV D cannot have: refused connections, refused handshakes, both policies."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.kv_requests import assert_p_holds_nothing, prompt_of, text_of
from tests.support.trio import MODEL, Trio, post_json, running_trio

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(200)]
LEASE_TTL_S = 3.0
DEADLINE_S = 20.0
REFUSALS = {
    # P listens on 127.0.0.1 alone: D's connection to the address P gives out is refused by the system.
    "handshake_failed": {"prefill": {"advertised_host": "127.0.0.2"}},
    # P answers the handshake, and D finds that they differ.
    "incompatible": {"decode": {"engine": {"grammar": {"disable_any_whitespace": True}}}},
}


def overrides_of(cause: str, policy: str) -> dict[str, dict[str, Any]]:
    sections: dict[str, dict[str, Any]] = {"prefill": {"lease_ttl_s": LEASE_TTL_S}, "decode": {}}
    sections["decode"]["on_pull_failure"] = policy
    for section, keys in REFUSALS[cause].items():
        sections[section] |= keys
    return sections


def failures(trio: Trio, cause: str) -> float:
    return trio.metrics("decode").get(f'pd_kv_pull_failures_total{{cause="{cause}"}}', 0.0)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("cause", list(REFUSALS))
def test_refused_kv_is_computed_again_or_fails_cleanly_and_p_gets_its_blocks_back(
    tmp_path: Path, cause: str, policy: str
) -> None:
    if not MODEL.exists():
        pytest.skip(f"no default model at {MODEL}: run `make model`")
    with running_trio(tmp_path, overrides_of(cause, policy)) as trio:
        for seed in (1, 2):
            body = {"model": "smollm2", "prompt": prompt_of(70, seed), "max_tokens": 8, "temperature": 0}
            body["ignore_eos"] = True
            status, answer, _ = post_json(trio.url("proxy") + "/v1/completions", body, DEADLINE_S)
            if policy == "recompute":
                assert status == 200, answer
                assert answer["choices"][0]["text"] == text_of(trio.url("prefill"), prompt_of(70, seed))
            else:
                assert status == 502, answer
                assert answer["error"]["message"]
        assert failures(trio, cause) >= 2
        assert_p_holds_nothing(trio)
        assert trio.total("decode", "pd_kv_blocks_in_use") == 0
        assert trio.total("decode", "pd_requests_running") == 0

"""P, D and the proxy as real processes that speak TLS with one another and with their client."""

import json
import urllib.request
from pathlib import Path

import pytest

from tests.support.certificates import self_signed
from tests.support.trio import MODEL, running_trio

pytestmark = [pytest.mark.slow, pytest.mark.long]


def test_kv_is_handed_over_between_engines_that_speak_tls(tmp_path: Path) -> None:
    if not MODEL.exists():
        pytest.skip(f"no default model at {MODEL}: run `make model`")
    certificate = self_signed(tmp_path)
    serves = {"cert_file": certificate.cert, "key_file": certificate.key}
    asks = {**serves, "ca_file": certificate.cert}
    engines = {**serves, "client_ca_file": certificate.cert}
    overrides = {
        "prefill": {"tls": engines},
        "decode": {"tls": engines, "prefill_tls": asks},
        "proxy": {"tls": serves, "engine_tls": asks},
    }
    tls = certificate.client(shows_own=True)
    with running_trio(tmp_path / "trio", overrides, tls=tls) as trio:
        body = {"model": "smollm2", "prompt": "one two three four", "max_tokens": 4, "temperature": 0}
        request = urllib.request.Request(
            trio.url("proxy") + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60, context=tls) as response:
            assert json.load(response)["usage"]["completion_tokens"] == 4
        assert trio.metrics("decode")['pd_prompt_tokens_total{source="pulled"}'] > 0

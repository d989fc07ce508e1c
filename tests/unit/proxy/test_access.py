import hashlib
from pathlib import Path

import pytest

from common.clock import ManualClock
from common.errors import AuthenticationFailed, ConfigError, RateLimited
from proxy.access import KeyRing, TokenBucket
from proxy.cors import Cors


def line(name: str, key: str, *rest: str) -> str:
    return " ".join([name, hashlib.sha256(key.encode()).hexdigest(), *rest])


def ring(folder: Path, *lines: str, clock: ManualClock | None = None) -> KeyRing:
    path = folder / "keys"
    path.write_text("\n".join(lines))
    return KeyRing(str(path), clock or ManualClock())


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_without_a_file_everyone_may_come_in() -> None:
    keys = KeyRing(None, ManualClock())
    assert keys.is_open
    assert keys.admit({}) is None


def test_a_known_key_is_named_and_any_other_is_refused(tmp_path: Path) -> None:
    keys = ring(tmp_path, "# people", "", line("alice", "k1"), line("bob", "k2") + " # temporary")
    assert keys.admit(bearer("k1")) == "alice"
    assert keys.admit({"authorization": "bearer k2"}) == "bob"
    for headers in ({}, bearer(""), bearer("k3"), {"authorization": "Basic k1"}, bearer("ä")):
        with pytest.raises(AuthenticationFailed):
            keys.admit(headers)


def test_a_key_may_ask_only_as_often_as_its_line_says(tmp_path: Path) -> None:
    clock = ManualClock()
    keys = ring(tmp_path, line("alice", "k1", "60"), line("bob", "k2"), clock=clock)
    for _ in range(10):
        keys.admit(bearer("k1"))
    with pytest.raises(RateLimited) as refused:
        keys.admit(bearer("k1"))
    assert refused.value.retry_after_s == pytest.approx(1.0)
    keys.admit(bearer("k2"))
    clock.advance(1)
    keys.admit(bearer("k1"))


def test_a_bucket_saves_up_no_more_than_its_size() -> None:
    clock = ManualClock()
    bucket = TokenBucket(clock, 6)
    clock.advance(3600)
    assert bucket.take() == 0
    assert bucket.take() == pytest.approx(10)


@pytest.mark.parametrize("text", ["alice", "alice abc", "alice " + "0" * 64 + " many", "alice " + "0" * 64 + " 1 2"])
def test_a_line_that_is_no_key_is_a_config_error_with_its_number(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="line 2"):
        ring(tmp_path, line("a", "k"), text)


def test_a_broken_file_on_reload_leaves_the_old_keys(tmp_path: Path) -> None:
    keys = ring(tmp_path, line("alice", "k1"))
    (tmp_path / "keys").write_text("nonsense")
    with pytest.raises(ConfigError):
        keys.reload()
    assert keys.admit(bearer("k1")) == "alice"
    (tmp_path / "keys").write_text(line("bob", "k2"))
    keys.reload()
    assert keys.admit(bearer("k2")) == "bob"


def test_only_listed_origins_get_cors_headers() -> None:
    cors = Cors(("https://a",))
    assert cors.headers({"origin": "https://a"})["Access-Control-Allow-Origin"] == "https://a"
    assert cors.headers({"origin": "https://b"}) == {}
    assert cors.headers({}) == {}
    assert Cors(("*",)).headers({"origin": "https://b"})["Access-Control-Allow-Origin"] == "https://b"
    assert Cors(()).preflight({"origin": "https://a"}, "POST") == {}
    asked = {"origin": "https://a", "access-control-request-headers": "authorization"}
    allowed = cors.preflight(asked, "POST")
    assert (allowed["Access-Control-Allow-Headers"], allowed["Access-Control-Allow-Methods"]) == (
        "authorization",
        "POST",
    )

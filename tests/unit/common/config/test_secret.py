from pathlib import Path

import pytest

from common.config.secret import read_secret
from common.errors import ConfigError


def test_no_place_is_no_secret():
    assert read_secret(None, None) is None


def test_a_file_gives_its_bytes_without_the_newline(tmp_path: Path):
    file = tmp_path / "secret"
    file.write_bytes(b"sixteen or more bytes\n")
    assert read_secret(str(file), None) == b"sixteen or more bytes"


def test_a_variable_gives_its_value(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PD_TEST_SECRET", "sixteen or more bytes")
    assert read_secret(None, "PD_TEST_SECRET") == b"sixteen or more bytes"


@pytest.mark.parametrize("content", [b"", b"short", b"   \n"])
def test_what_is_no_secret_is_refused_without_showing_it(tmp_path: Path, content: bytes):
    file = tmp_path / "secret"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="at least 16 bytes") as caught:
        read_secret(str(file), None)
    assert "short" not in str(caught.value)


def test_a_place_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="nothing"):
        read_secret(str(tmp_path / "nothing"), None)
    with pytest.raises(ConfigError, match="PD_TEST_UNSET"):
        read_secret(None, "PD_TEST_UNSET")


def test_two_places_exclude_each_other():
    with pytest.raises(ConfigError, match="exclude"):
        read_secret("a", "B")

"""A start that cannot work ends with one clear line and the right exit status."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.trio import ROOT, free_port, write_config


def start(role: str, config: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", role, "--config", str(config)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)


@pytest.fixture
def ports() -> dict[str, int]:
    return {role: free_port() for role in ("proxy", "prefill", "decode")}


@pytest.mark.parametrize("role", ["proxy", "prefill", "decode"])
def test_an_unknown_key_names_file_key_and_what_is_allowed(role: str, tmp_path: Path, ports: dict[str, int]) -> None:
    config = write_config(tmp_path, ports, {role: {"prot": 1}})
    ended = start(role, config)
    assert ended.returncode == 2
    line = ended.stderr.strip().splitlines()[-1]
    assert str(config) in line
    assert "prot" in line
    assert "port" in line


@pytest.mark.parametrize("role", ["proxy", "prefill", "decode"])
def test_a_taken_port_is_named(role: str, tmp_path: Path, ports: dict[str, int]) -> None:
    config = write_config(tmp_path, ports, {})
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", ports[role]))
        squatter.listen()
        ended = start(role, config)
    assert ended.returncode == 1
    assert str(ports[role]) in ended.stderr.strip().splitlines()[-1]


def test_a_wrong_model_path_is_named(tmp_path: Path, ports: dict[str, int]) -> None:
    config = write_config(tmp_path, ports, {"engine": {"model": str(tmp_path / "nothing.gguf")}})
    ended = start("prefill", config)
    assert ended.returncode == 1
    assert "nothing.gguf" in ended.stderr.strip().splitlines()[-1]


def test_a_file_that_is_no_model_is_refused_in_one_line(tmp_path: Path, ports: dict[str, int]) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but not really")
    config = write_config(tmp_path, ports, {"engine": {"model": str(tmp_path / "broken.gguf")}})
    ended = start("decode", config)
    assert ended.returncode == 1
    assert "broken.gguf" in ended.stderr.strip().splitlines()[-1]
    assert "Traceback" not in ended.stderr

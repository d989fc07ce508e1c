import socket
from pathlib import Path

import pytest

from proxy.main import main


def write(folder: Path, text: str) -> str:
    path = folder / "pd.yaml"
    path.write_text(text)
    return str(path)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("proxy: {prot: 1}", ["proxy.prot", "`port`"]),
        ("proxy: {port: 70000}", ["proxy.port", "65535"]),
        ("proxy: {fleet: {decode: [127.0.0.1:1]}}", ["fleet.decode", "http://"]),
        ("proxy: {}", ["fleet.decode"]),
        ("proxy: {structured_output: magic}", ["proxy.structured_output", "magic"]),
        ("proxy: {timeouts: {prefill_s: 0}}", ["proxy.timeouts.prefill_s"]),
    ],
)
def test_a_wrong_config_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: list[str]
) -> None:
    assert main(["--config", write(tmp_path, text)]) == 2
    error = one_line(capsys)
    assert all(word in error for word in words), error


def test_a_taken_port_is_one_line_and_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        text = f"proxy: {{port: {taken.getsockname()[1]}, fleet: {{decode: ['http://127.0.0.1:1']}}}}"
        assert main(["--config", write(tmp_path, text)]) == 1
    assert "cannot listen" in one_line(capsys)


def test_check_validates_and_serves_nothing(tmp_path: Path) -> None:
    assert main(["check", "--config", write(tmp_path, "proxy: {fleet: {decode: ['http://127.0.0.1:1']}}")]) == 0

from pathlib import Path

import pytest

from common.errors import ConfigError
from common.telemetry.metrics import Metrics
from kv_transfer.interface import ReleaseCause
from kv_transfer.stats import ProducerStats
from prefill.main import main, read
from prefill.role import kv_readings
from tests.support.certificates import self_signed


def write(path: Path, text: str) -> str:
    file = path / "pd.yaml"
    file.write_text(text)
    return str(file)


def test_settings_come_from_the_role_s_own_section(tmp_path: Path):
    settings = read(write(tmp_path, "engine: {model: m.gguf}\nprefill: {port: 9, drain_s: 3}\ndecode: {port: 8}\n"))
    assert (settings.config.port, settings.config.drain_s) == (9, 3.0)


def test_a_buffer_that_is_not_there_is_refused_by_name_and_host_memory_is_host_memory(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"prefill\.kv_buffer_device.*cuda:1.*device"):
        read(write(tmp_path, "engine: {model: m, device: cuda:1}\nprefill: {kv_buffer_device: cpu}\n"))
    assert read(write(tmp_path, "engine: {model: m}\nprefill: {kv_buffer_device: cpu}\n")).engine.device == "cpu"


@pytest.mark.parametrize("key", ["host", "advertised_host"])
def test_unsigned_references_stay_on_this_machine(tmp_path: Path, key: str):
    with pytest.raises(ConfigError, match=f"prefill.{key}.*secret"):
        read(write(tmp_path, f"engine: {{model: m.gguf}}\nprefill: {{{key}: 10.0.0.1}}\n"))


def test_with_a_secret_other_machines_may_come(tmp_path: Path):
    (tmp_path / "secret").write_text("sixteen or more bytes")
    text = f"engine: {{model: m.gguf}}\nprefill: {{host: 0.0.0.0, secret_file: {tmp_path / 'secret'}}}\n"
    assert read(write(tmp_path, text)).config.host == "0.0.0.0"


@pytest.mark.parametrize(
    ("text", "word"), [("prefill: {prot: 1}", "prot"), ("prefil: {}", "prefil"), ("engine: {}", "model"), ("[", "YAML")]
)
def test_a_wrong_config_is_exit_2_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, word: str
):
    path = write(tmp_path, text)
    assert main(["--config", path]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"pd-prefill: {path}")
    assert word in line


def test_leases_are_shown_by_how_they_ended():
    stats = ProducerStats(
        leases_held=2, leases_released={ReleaseCause.READ: 3}, late_notifications=4, unreadable_notifications=0
    )
    registry = Metrics()
    registry.add_source(kv_readings(lambda: stats))
    text = registry.render().decode()
    assert "pd_leases_held 2.0" in text
    assert 'pd_leases_released_total{cause="read"} 3.0' in text
    assert 'pd_kv_stray_notifications_total{kind="late"} 4.0' in text


def test_files_of_tls_start_at_the_config_s_folder_and_a_missing_one_is_named(tmp_path: Path):
    self_signed(tmp_path)
    text = "engine: {model: m.gguf}\nprefill: {tls: {cert_file: %s, key_file: key.pem}}\n"
    assert read(write(tmp_path, text % "cert.pem")).tls is not None
    with pytest.raises(ConfigError, match=r"prefill\.tls\.cert_file.*gone\.pem"):
        read(write(tmp_path, text % "gone.pem"))
    with pytest.raises(ConfigError, match=r"prefill\.tls\.cert_file.*missing"):
        read(write(tmp_path, "engine: {model: m.gguf}\nprefill: {tls: {key_file: key.pem}}\n"))

from pathlib import Path

import pytest

from common.errors import ConfigError
from common.telemetry.metrics import Metrics
from decode.main import main, read
from decode.role import kv_readings
from kv_transfer.interface import FailureCause
from kv_transfer.stats import ConsumerStats, HistogramValue
from tests.support.certificates import self_signed


def write(path: Path, text: str) -> str:
    file = path / "pd.yaml"
    file.write_text(text)
    return str(file)


def test_settings_come_from_the_role_s_own_section(tmp_path: Path):
    settings = read(write(tmp_path, "engine: {model: m.gguf}\ndecode: {port: 9}\n"))
    assert (settings.config.port, settings.engine.model[-6:]) == (9, "m.gguf")


def test_a_buffer_that_is_not_there_is_refused_by_name_and_host_memory_is_host_memory(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"decode\.kv_buffer_device.*cuda:1.*device"):
        read(write(tmp_path, "engine: {model: m, device: cuda:1}\ndecode: {kv_buffer_device: cpu}\n"))
    assert read(write(tmp_path, "engine: {model: m}\ndecode: {kv_buffer_device: cpu}\n")).engine.device == "cpu"


def test_unsigned_references_stay_on_this_machine(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"decode\.host.*secret"):
        read(write(tmp_path, "engine: {model: m.gguf}\ndecode: {host: 0.0.0.0}\n"))


def test_a_wrong_policy_names_what_is_allowed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--config", write(tmp_path, "engine: {model: m}\ndecode: {on_pull_failure: shrug}\n")]) == 2
    assert "on_pull_failure" in capsys.readouterr().err


def test_pulls_are_shown_with_their_histogram():
    stats = ConsumerStats(
        pulls_done=3,
        pulls_cancelled=0,
        pulls_failed={FailureCause.TIMEOUT: 1},
        pulls_running=0,
        expected=0,
        bytes_pulled=4096,
        descriptors=1,
        pull_seconds=HistogramValue(bounds=(0.1, 0.2), counts=(1, 1, 1), total=0.75),
        handshakes=1,
        handshake_failures=0,
        peers_ready=1,
    )
    registry = Metrics()
    registry.add_source(kv_readings(lambda: stats))
    text = registry.render().decode()
    assert 'pd_kv_pull_seconds_bucket{le="0.2"} 2.0' in text
    assert 'pd_kv_pull_seconds_bucket{le="+Inf"} 3.0' in text
    assert "pd_kv_pull_bytes_total 4096.0" in text
    assert "pd_kv_pull_descriptors_total 1.0" in text
    assert 'pd_kv_handshakes_total{event="begun"} 1.0' in text
    assert "pd_kv_peers_ready 1.0" in text
    assert 'pd_kv_pull_failures_total{cause="timeout"} 1.0' in text


def test_files_of_tls_start_at_the_config_s_folder_and_a_missing_one_is_named(tmp_path: Path):
    self_signed(tmp_path)
    text = "engine: {model: m.gguf}\ndecode: {tls: {cert_file: %s, key_file: key.pem}}\n"
    assert read(write(tmp_path, text % "cert.pem")).tls is not None
    with pytest.raises(ConfigError, match=r"decode\.tls\.cert_file.*gone\.pem"):
        read(write(tmp_path, text % "gone.pem"))
    with pytest.raises(ConfigError, match=r"decode\.tls\.cert_file.*missing"):
        read(write(tmp_path, "engine: {model: m.gguf}\ndecode: {tls: {key_file: key.pem}}\n"))


def test_p_is_asked_over_tls_only_where_the_file_says_so(tmp_path: Path):
    self_signed(tmp_path)
    engine = "engine: {model: m.gguf}\n"
    assert read(write(tmp_path, engine)).prefill_tls is None
    assert read(write(tmp_path, engine + "decode: {prefill_tls: {}}\n")).prefill_tls is not None
    assert read(write(tmp_path, engine + "decode: {prefill_tls: {ca_file: cert.pem}}\n")).prefill_tls is not None
    with pytest.raises(ConfigError, match=r"decode\.prefill_tls\.ca_file.*gone"):
        read(write(tmp_path, engine + "decode: {prefill_tls: {ca_file: gone}}\n"))

import pytest
from structlog.testing import capture_logs

from common.clock import ManualClock
from common.config.engine import EngineConfig
from common.errors import ConfigError
from common.serving.assembly import load_engine
from common.telemetry.metrics import Metrics
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_model import random_weights, tiny_config


@pytest.fixture
def model(tmp_path):
    write_tiny_gguf(tmp_path / "m.gguf", tiny_config(), random_weights(tiny_config()))
    return str(tmp_path / "m.gguf")


@pytest.mark.parametrize("backend", ["flashinfer", "triton"])
def test_an_attention_backend_for_cuda_stops_the_start_of_an_engine_on_the_cpu(model, backend):
    config = EngineConfig(model=model, attention_backend=backend)

    with pytest.raises(ConfigError, match=f"attention_backend: {backend} runs on cuda, not on cpu; use auto"):
        load_engine(config, ManualClock(0.0), Metrics())


def test_why_better_kernels_are_not_in_use_is_one_line_of_the_log(model):
    with capture_logs() as logs:
        load_engine(EngineConfig(model=model, dtype="float16", num_kv_blocks=8), ManualClock(0.0), Metrics())

    (line,) = [line for line in logs if line["event"] == "model.kernels"]
    assert (line["kernels"], line["because"]) == ("torch", "the compiled kernels do not compute float16")

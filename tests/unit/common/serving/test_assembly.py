import pytest

from common.clock import ManualClock
from common.config.engine import EngineConfig
from common.errors import ConfigError
from common.serving.assembly import load_engine
from common.telemetry.metrics import Metrics
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_model import random_weights, tiny_config


@pytest.mark.parametrize("backend", ["flashinfer", "triton"])
def test_an_attention_backend_for_cuda_stops_the_start_of_an_engine_on_the_cpu(tmp_path, backend):
    write_tiny_gguf(tmp_path / "m.gguf", tiny_config(), random_weights(tiny_config()))
    config = EngineConfig(model=str(tmp_path / "m.gguf"), attention_backend=backend)

    with pytest.raises(ConfigError, match=f"attention_backend: {backend} runs on cuda, not on cpu; use auto"):
        load_engine(config, ManualClock(0.0), Metrics())

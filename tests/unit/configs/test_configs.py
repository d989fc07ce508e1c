from pathlib import Path

import msgspec
import pytest
import yaml

from common.config.engine import EngineConfig, SpeculativeConfig
from common.config.loader import load_section, role_engine_config
from decode.config import DecodeConfig
from prefill.config import PrefillConfig
from proxy.config import ProxyConfig

FOLDER = Path(__file__).parents[3] / "configs"
SECTIONS: dict[str, type[msgspec.Struct]] = {"prefill": PrefillConfig, "decode": DecodeConfig, "proxy": ProxyConfig}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_file_loads(path: Path):
    for name, section in SECTIONS.items():
        load_section(path, name, section)
    written = yaml.safe_load(path.read_text())
    if "engine" in written:
        for role in ("prefill", "decode"):
            engine = role_engine_config(path, role)
            assert Path(engine.model).parent.name == "models"


def test_the_default_file_shows_every_key_of_the_engines():
    written = yaml.safe_load((FOLDER / "pd.yaml").read_text())
    for name, section in (("engine", EngineConfig), ("prefill", PrefillConfig), ("decode", DecodeConfig)):
        assert set(written[name]) == set(section.__struct_encode_fields__), name


def test_what_the_default_file_calls_a_default_is_one():
    written = yaml.safe_load((FOLDER / "pd.yaml").read_text())
    for name, section in (("prefill", PrefillConfig), ("decode", DecodeConfig), ("proxy", ProxyConfig)):
        kept = {key: value for key, value in written[name].items() if key != "fleet"}
        assert msgspec.convert(kept, section) == section(), name
    differing = {"model", "dtype", "kv_cache_bytes", "tool_parser", "speculative_config"}
    kept = {key: value for key, value in written["engine"].items() if key not in differing}
    assert msgspec.convert({**kept, "model": ""}, EngineConfig) == EngineConfig(model="")
    guessing = {**written["engine"]["speculative_config"], "method": "none"}
    assert msgspec.convert(guessing, SpeculativeConfig) == SpeculativeConfig()


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.name)
def test_every_key_with_a_value_has_a_comment_or_says_it_all(path: Path):
    says_it_all = ("port:", "device:")
    for line in path.read_text().splitlines():
        key = line.strip()
        is_value = key and not key.startswith("#") and not key.split("#")[0].rstrip().endswith(":")
        assert not is_value or "#" in line or key.startswith(says_it_all) or key == "decode: least_loaded", line


def test_the_gpu_file_puts_the_engines_on_two_devices():
    path = FOLDER / "pd_cuda.yaml"
    assert [role_engine_config(path, role).device for role in ("prefill", "decode")] == ["cuda:0", "cuda:1"]

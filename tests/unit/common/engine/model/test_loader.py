from pathlib import Path

import pytest
import torch

from common.engine.model import export
from common.engine.model.loader import load_model
from common.errors import ConfigError, StartupError
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_model import random_weights, tiny_config


@pytest.fixture
def gguf_path(tmp_path):
    config = tiny_config()
    write_tiny_gguf(tmp_path / "m.gguf", config, random_weights(config))
    return tmp_path / "m.gguf"


@pytest.mark.parametrize(
    ("dtype", "kernels", "kv_dtype"),
    [
        ("float32", "torch", torch.float32),
        ("float32", "auto", torch.float32),
        ("bfloat16", "torch", torch.bfloat16),
        ("float16", "auto", torch.float16),
        ("int8", "torch", torch.float32),
        ("int8", "auto", torch.bfloat16),
    ],
)
def test_the_model_says_what_its_kv_cache_must_be(gguf_path, dtype, kernels, kv_dtype):
    loaded = load_model(gguf_path, dtype=dtype, kernels=kernels)

    assert loaded.model.dtype == kv_dtype
    assert loaded.model.device == torch.device("cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_the_compiled_kernels_keep_k_and_v_as_asked(gguf_path, dtype):
    loaded = load_model(gguf_path, dtype=dtype, kernels="cpu")

    assert loaded.kv_cache_dtype("auto") == loaded.model.dtype
    assert loaded.kv_cache_dtype("float32") == torch.float32
    assert loaded.kv_cache_dtype("bfloat16") == torch.bfloat16


def test_other_kernels_keep_k_and_v_in_their_own_dtype_and_say_so(gguf_path):
    loaded = load_model(gguf_path, dtype="float16")

    assert loaded.kv_cache_dtype("auto") == torch.float16
    with pytest.raises(
        ConfigError, match=r"kv_cache_dtype: float32 needs .*; torch keeps K and V in float16; use auto"
    ):
        loaded.kv_cache_dtype("float32")


def test_without_compiled_kernels_torch_computes_and_the_reason_is_told(gguf_path):
    loaded = load_model(gguf_path, dtype="float16")

    assert loaded.kernels == "torch"
    assert loaded.kernels_note == "the compiled kernels do not compute float16"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "fp4"}, "dtype fp4 is not supported; supported: float32, bfloat16, float16, int8"),
        ({"device": "cuda:99"}, "device cuda:99: this machine has"),
        ({"device": "toaster"}, "device toaster is not one"),
        ({"device": "meta"}, "device meta is not supported"),
        ({"kernels": "magic"}, "kernels magic are unknown"),
        ({"kernels": "triton"}, "attention_backend: triton runs on cuda, not on cpu; use auto"),
        ({"kernels": "flashinfer"}, "attention_backend: flashinfer runs on cuda, not on cpu; use auto"),
        ({"kernels": "cpu", "dtype": "float16"}, "kernels cpu: the compiled kernels do not compute float16"),
    ],
)
def test_bad_choices_stop_the_start_by_name(gguf_path, arguments, message):
    with pytest.raises(StartupError, match=message):
        load_model(gguf_path, **arguments)


def test_a_path_without_a_model_is_one_line(tmp_path):
    with pytest.raises(StartupError, match="no such file or folder"):
        load_model(Path("/nowhere/model.gguf"))
    (tmp_path / "model.bin").touch()
    with pytest.raises(StartupError, match=r"neither a \.gguf file nor a folder"):
        load_model(tmp_path / "model.bin")
    with pytest.raises(StartupError, match=r"config\.json is missing"):
        load_model(tmp_path)


def test_export_is_a_command_that_fails_in_one_line(gguf_path, tmp_path, capsys):
    assert export.main([str(gguf_path), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert export.main([str(tmp_path / "nothing"), str(tmp_path / "out2")]) == 1
    assert capsys.readouterr().err.count("\n") == 1

import json

import pytest
import torch
from safetensors.torch import save_file

from common.engine.model.export import export_checkpoint
from common.engine.model.hf_reader import read_hf_folder
from common.engine.model.loader import load_model, read_checkpoint
from common.errors import StartupError
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_model import random_weights, tiny_config, tiny_model


@pytest.fixture
def folder(tmp_path):
    """An exported tiny llama."""
    config = tiny_config()
    write_tiny_gguf(tmp_path / "m.gguf", config, random_weights(config))
    export_checkpoint(read_checkpoint(tmp_path / "m.gguf"), tmp_path / "hf")
    return tmp_path / "hf"


def change_json(path, **changes):
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **changes}))


def test_an_exported_model_is_the_same_model(folder):
    loaded = load_model(folder)

    assert loaded.weights_fingerprint == tiny_model().weights_fingerprint
    assert loaded.fingerprint == load_model(folder.parent / "m.gguf").fingerprint
    assert loaded.config == read_checkpoint(folder.parent / "m.gguf").config


def test_weights_may_be_spread_over_files_by_an_index(folder):
    config = tiny_config()
    weights = random_weights(config)
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, part in shards.items():
        save_file({name: weights[name].clone() for name in part}, folder / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    change_json(folder / "model.safetensors.index.json", metadata={}, weight_map=weight_map)

    assert load_model(folder).weights_fingerprint == tiny_model().weights_fingerprint

    (folder / "b.safetensors").unlink()
    with pytest.raises(StartupError, match=r"b\.safetensors is missing"):
        load_model(folder)


def test_all_ends_of_the_generation_config_and_the_tokenizers_own_count(folder):
    change_json(folder / "generation_config.json", eos_token_id=[257, 258], temperature=0.6, top_k=20)

    loaded = load_model(folder)

    assert loaded.config.eos_token_ids == loaded.tokenizer.eos_token_ids == {256, 257, 258}
    assert (loaded.generation.temperature, loaded.generation.top_k, loaded.generation.top_p) == (0.6, 20, None)


def test_without_a_generation_config_the_config_names_the_ends(folder):
    (folder / "generation_config.json").unlink()
    change_json(folder / "config.json", eos_token_id=258)

    assert read_hf_folder(folder).config.eos_token_ids == {256, 258}


def test_the_template_file_wins_over_the_tokenizer_config(folder):
    change_json(folder / "tokenizer_config.json", chat_template="old")
    assert read_hf_folder(folder).chat_template == "old"
    (folder / "chat_template.jinja").write_text("new")
    assert read_hf_folder(folder).chat_template == "new"


def test_of_several_templates_the_default_is_taken(folder):
    change_json(
        folder / "tokenizer_config.json",
        chat_template=[{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}],
        eos_token={"content": "<|pad|>", "special": True},
    )
    checkpoint = read_hf_folder(folder)
    assert checkpoint.chat_template == "d"
    assert checkpoint.special_tokens["eos_token"] == "<|pad|>"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()

    with pytest.raises(StartupError, match=name.replace("model", "")):
        load_model(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
def test_a_damaged_file_is_named_in_one_line(folder, name):
    (folder / name).write_text('{"broken": ')

    with pytest.raises(StartupError, match=name) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type mamba is not supported; supported: llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope type yarn"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"hidden_size": "wide"}, r"config\.json: Expected `int`"),
        ({"num_key_value_heads": 3}, "4 query heads do not share 3 KV heads"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"vocab_size": 99}, r"model\.embed_tokens\.weight has shape \[272, 32\], the config says \[99, 32\]"),
        ({"num_hidden_layers": 3}, r"tensor model\.layers\.2\.\S+ is missing"),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 4,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            "sliding_window in some layers only",
        ),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_by_name(folder, changes, message):
    change_json(folder / "config.json", **changes)

    with pytest.raises(StartupError, match=message):
        load_model(folder)


def test_weights_are_read_in_the_dtype_they_are_stored_in(folder):
    export_checkpoint(read_checkpoint(folder), folder, "bfloat16")

    assert read_hf_folder(folder).weights.read("model.norm.weight").dtype == torch.bfloat16
    assert load_model(folder, dtype="bfloat16").model.dtype == torch.bfloat16

import gguf
import pytest
import torch

from common.engine.model.config import ModelFamily
from common.engine.model.loader import load_model, read_checkpoint
from common.errors import StartupError
from tests.support.paged_forward import PagedDriver
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_model import random_weights, tiny_config, tiny_model

PROMPT = list(b"hello, paged world")
FAMILIES = {
    "llama": {"family": ModelFamily.LLAMA},
    "llama with biases": {"family": ModelFamily.LLAMA, "qkv_bias": True, "tie_word_embeddings": False},
    "qwen2": {"family": ModelFamily.QWEN2, "qkv_bias": True},
    "qwen3": {"family": ModelFamily.QWEN3, "qk_norm": True},
}


@pytest.mark.parametrize("changes", FAMILIES.values(), ids=FAMILIES.keys())
def test_a_file_gives_the_config_and_the_logits_it_was_written_from(tmp_path, changes):
    config = tiny_config(**changes)
    write_tiny_gguf(tmp_path / "m.gguf", config, random_weights(config))
    expected = tiny_model(**changes)

    loaded = load_model(tmp_path / "m.gguf")

    assert loaded.config.bos_token_id == 257
    for name in ("family", "head_dim", "rms_norm_eps", "qkv_bias", "qk_norm", "tie_word_embeddings", "eos_token_ids"):
        assert getattr(loaded.config, name) == getattr(config, name)
    logits = [PagedDriver(m.model, config, num_blocks=8).run(PROMPT, []) for m in (expected, loaded)]
    torch.testing.assert_close(logits[0], logits[1])
    assert loaded.weights_fingerprint == expected.weights_fingerprint


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_quantised_matrices_are_read_as_float32(tmp_path, kind):
    config = tiny_config()
    weights = random_weights(config)
    quantization = gguf.GGMLQuantizationType[kind]
    write_tiny_gguf(tmp_path / "m.gguf", config, weights, quantization=quantization)

    read = read_checkpoint(tmp_path / "m.gguf").weights.read("model.layers.0.mlp.down_proj.weight")

    assert read.dtype == torch.float32
    assert (read - weights["model.layers.0.mlp.down_proj.weight"]).abs().max() < 0.1


def test_llama3_frequency_divisors_are_read(tmp_path):
    config = tiny_config()
    divisors = torch.tensor([1.0, 2.0, 4.0, 8.0])
    write_tiny_gguf(tmp_path / "m.gguf", config, random_weights(config), extra={"rope_freqs.weight": divisors})

    rope = read_checkpoint(tmp_path / "m.gguf").config.rope

    assert rope.frequency_divisors == (1.0, 2.0, 4.0, 8.0)


def test_every_end_the_metadata_names_ends_an_output(tmp_path):
    config = tiny_config()
    write_tiny_gguf(tmp_path / "m.gguf", config, random_weights(config), metadata={"tokenizer.ggml.eot_token_id": 258})

    checkpoint = read_checkpoint(tmp_path / "m.gguf")

    assert checkpoint.config.eos_token_ids == checkpoint.tokenizer.eos_token_ids == {256, 258}


def test_a_sentencepiece_vocabulary_is_read_with_its_bos_and_bytes(tmp_path):
    config = tiny_config()
    write_tiny_gguf(tmp_path / "m.gguf", config, random_weights(config), sentencepiece=True)

    checkpoint = read_checkpoint(tmp_path / "m.gguf")
    tokenizer = checkpoint.tokenizer

    assert tokenizer.encode("hi hi\n") == [257, 264, 264, 10]
    assert tokenizer.encode("hi", add_special_tokens=False) == [264]
    assert tokenizer.decode([257, 264, 264, 10]) == "hi hi\n"
    assert [tokenizer.token_bytes(token_id) for token_id in (264, 10, 0xE6, 258)] == [b" hi", b"\n", b"\xe6", b""]
    assert checkpoint.config.eos_token_ids == {258}
    assert checkpoint.special_tokens["bos_token"] == "<s>"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "mamba"}, "architecture mamba is not supported; supported: llama, mistral, qwen2"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling yarn is not supported"),
        ({"llama.rope.dimension_count": 4}, "rotary embedding over 4 of 8 dimensions"),
        ({"tokenizer.ggml.pre": "unheard-of"}, "pre-tokenizer unheard-of is not supported"),
        ({"tokenizer.ggml.model": "rwkv"}, "tokenizer model rwkv in GGUF is not supported; supported: gpt2, llama"),
        ({"llama.context_length": "many"}, "GGUF key llama.context_length"),
    ],
)
def test_what_cannot_be_computed_exactly_is_refused_by_name(tmp_path, metadata, message):
    config = tiny_config()
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, config, random_weights(config), metadata=metadata)

    with pytest.raises(StartupError, match=message):
        load_model(path)


def test_a_file_that_is_not_gguf_is_refused_in_one_line(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"not a model at all, but long enough to have a header")

    with pytest.raises(StartupError, match=r"m\.gguf: not a readable GGUF file") as caught:
        load_model(tmp_path / "m.gguf")
    assert "\n" not in str(caught.value)


def test_a_missing_tensor_is_named(tmp_path):
    config = tiny_config()
    weights = random_weights(config)
    del weights["model.norm.weight"]
    write_tiny_gguf(tmp_path / "m.gguf", config, weights)

    with pytest.raises(StartupError, match=r"model\.norm\.weight is missing"):
        load_model(tmp_path / "m.gguf")

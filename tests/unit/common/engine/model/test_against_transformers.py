"""Random tiny models of every family: our forward beside transformers', from the folder transformers writes."""

import pytest
import torch
import transformers

from common.engine.model.loader import load_model
from tests.support.byte_tokenizer import ByteTokenizer
from tests.support.paged_forward import PagedDriver

PROMPT = list(b"Chunks of a prompt that is a good deal longer than one block. " * 3)
SHAPE = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": [256, 258],
    "bos_token_id": 257,
    "pad_token_id": 258,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE, rope_theta=100000.0, rms_norm_eps=1e-5),
    "llama with biases": lambda: transformers.LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, head_dim=32),
    "llama3 rope": lambda: transformers.LlamaConfig(**SHAPE, rope_parameters=LLAMA3, tie_word_embeddings=True),
    "linear rope": lambda: transformers.LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "mistral": lambda: transformers.MistralConfig(**SHAPE, head_dim=16, sliding_window=None),
    "mistral with a window": lambda: transformers.MistralConfig(**SHAPE, sliding_window=40),
    "qwen2": lambda: transformers.Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, head_dim=32),
}


def write_random_model(folder, config):
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms start as 1 and biases as 0: too kind to a decoder that forgets them
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(ByteTokenizer().hf_tokenizer_json)
    return model


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES.keys())
@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_logits_equal_transformers_whole_and_in_chunks(tmp_path, config, kernels):
    reference = write_random_model(tmp_path, config())
    loaded = load_model(tmp_path, kernels=kernels)
    driver = PagedDriver(loaded.model, loaded.config, num_blocks=40, block_size=8)

    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT])).logits[0]

    assert loaded.config.eos_token_ids == {256, 258}
    for chunks in ([], [1, 50, 8, 1, 1, 64]):
        torch.testing.assert_close(driver.run(PROMPT, chunks), expected, atol=1e-4, rtol=1e-4)

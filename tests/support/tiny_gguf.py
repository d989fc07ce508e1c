"""Writes tiny GGUF files the way llama.cpp's conversion does: its names, and for llama its row order of q and k."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch

from common.engine.model.config import ModelConfig, ModelFamily
from tests.support.byte_tokenizer import SPECIAL_TOKENS, ByteTokenizer

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, index, rest = stem.split(".", 3)
        return f"blk.{index}.{_NAMES[rest]}.{kind}"
    return f"{_NAMES[stem]}.{kind}"


def interleave_rows(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """HF halves to llama.cpp pairs: x0 x1 .. y0 y1 .. -> x0 y0 x1 y1 .."""
    halves = tensor.view(num_heads, 2, -1, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def write_tiny_gguf(
    path: Path,
    config: ModelConfig,
    weights: Mapping[str, torch.Tensor],
    *,
    metadata: Mapping[str, str | int | bool] | None = None,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    extra: Mapping[str, torch.Tensor] | None = None,
    sentencepiece: bool = False,
) -> None:
    """A file with a byte-level vocabulary (`ByteTokenizer`'s and three merges, padded to `config.vocab_size`).

    `sentencepiece` writes bytes, specials and a few scored pieces instead.
    `metadata` adds or replaces keys; `extra` adds tensors under their GGUF names; matrices become `quantization`.
    """
    writer = gguf.GGUFWriter(path, config.family.value)
    _write_shape(writer, config)
    if sentencepiece:
        _write_sentencepiece(writer, config)
    else:
        _write_tokenizer(writer, config)
    for key, value in (metadata or {}).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    for name, tensor in weights.items():
        stored = tensor
        if config.family is ModelFamily.LLAMA and ".q_proj." in name:
            stored = interleave_rows(tensor, config.num_heads)
        if config.family is ModelFamily.LLAMA and ".k_proj." in name:
            stored = interleave_rows(tensor, config.num_kv_heads)
        _add_tensor(writer, gguf_name(name), stored, quantization)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_shape(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _write_tokenizer(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    vocab = {**ByteTokenizer().vocab(), "he": 261, "ll": 262, "hell": 263}
    tokens = {token_id: piece for piece, token_id in vocab.items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokens.get(token_id, f"[PAD{token_id}]") for token_id in range(config.vocab_size)])
    kinds = [
        gguf.TokenType.NORMAL if token_id in tokens else gguf.TokenType.UNUSED for token_id in range(config.vocab_size)
    ]
    for token_id in SPECIAL_TOKENS.values():
        kinds[token_id] = gguf.TokenType.CONTROL
    writer.add_token_types(kinds)
    writer.add_token_merges(["h e", "l l", "he ll"])
    writer.add_eos_token_id(256)
    writer.add_bos_token_id(257)
    writer.add_pad_token_id(258)


def _write_sentencepiece(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    pieces = ["<unk>", "<s>", "</s>", "\u2581", "h", "i", "\u2581h", "hi", "\u2581hi"]
    tokens = [f"<0x{byte:02X}>" for byte in range(256)] + pieces
    tokens += [f"[PAD{token_id}]" for token_id in range(len(tokens), config.vocab_size)]
    kinds = [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.UNKNOWN] + [gguf.TokenType.CONTROL] * 2
    kinds += [gguf.TokenType.NORMAL] * (len(pieces) - 3)
    kinds += [gguf.TokenType.UNUSED] * (config.vocab_size - len(kinds))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_scores([-float(token_id) for token_id in range(config.vocab_size)])
    writer.add_unk_token_id(256)
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, quantization: gguf.GGMLQuantizationType
) -> None:
    values = tensor.numpy().astype(np.float32)
    if tensor.ndim == 1 or quantization is gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, values)
        return
    writer.add_tensor(name, gguf.quants.quantize(values, quantization), raw_dtype=quantization)

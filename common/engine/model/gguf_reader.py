"""A GGUF file as a `Checkpoint`: shapes from its metadata, weights in Hugging Face names and row order.

Owns: the mapping of keys and tensor names, undoing llama.cpp's row order. Its tokenizer: `gguf_tokenizer`.
Source: the GGUF specification and llama.cpp's conversion (`convert_hf_to_gguf.py`: `LlamaModel.permute`).
"""

import re
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize

from common.engine.model.checkpoint import Checkpoint
from common.engine.model.config import GenerationDefaults, ModelConfig, ModelFamily, RopeConfig, supported_families
from common.engine.model.gguf_metadata import GgufMetadata
from common.engine.model.gguf_tokenizer import eos_token_ids, read_tokenizer, special_tokens
from common.errors import StartupError

_HF_WHOLE_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_HF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_INTERLEAVED_ROWS = re.compile(r"self_attn\.([qk])_proj\.")


def read_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file; tensors stay on disk (memory-mapped) until asked for.

    Raises:
        StartupError: not a GGUF file, an unsupported architecture, or a needed key is missing.
    """
    try:
        reader = GGUFReader(path)
    except (OSError, ValueError, LookupError) as error:
        raise StartupError(f"{path}: not a readable GGUF file: {error}") from error
    metadata = GgufMetadata(path, reader)
    weights = GgufWeights(path, reader)
    config = _read_config(path, metadata, weights)
    if config.family is ModelFamily.LLAMA:
        weights.undo_row_order(config.num_heads, config.num_kv_heads)
    return Checkpoint(
        config=config,
        weights=weights,
        tokenizer=read_tokenizer(path, metadata),
        chat_template=metadata.text("tokenizer.chat_template"),
        special_tokens=special_tokens(metadata),
        generation=GenerationDefaults(),
    )


class GgufWeights:
    """Tensors of a GGUF file under their Hugging Face names, dequantised to float32 as they are read."""

    def __init__(self, path: Path, reader: GGUFReader) -> None:
        self._path = path
        self._tensors = {hf_name(tensor.name): tensor for tensor in reader.tensors}
        self._heads = {"q": 0, "k": 0}

    @property
    def names(self) -> frozenset[str]:
        """All tensors; those without a Hugging Face name keep GGUF's."""
        return frozenset(self._tensors)

    def undo_row_order(self, num_heads: int, num_kv_heads: int) -> None:
        """From now on give q and k projections in rotate-half order; the file has pairs interleaved (llama only)."""
        self._heads = {"q": num_heads, "k": num_kv_heads}

    def read(self, name: str) -> torch.Tensor:
        """The tensor as float32 on the CPU.

        Raises:
            StartupError: it is missing, or of a quantisation the `gguf` package cannot read.
        """
        tensor = self._tensors.get(name)
        if tensor is None:
            raise StartupError(f"{self._path}: tensor {name} is missing")
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise StartupError(f"{self._path}: tensor {name}: {error}") from error
        weight = torch.from_numpy(np.array(values, dtype=np.float32))
        projection = _INTERLEAVED_ROWS.search(name)
        heads = self._heads[projection.group(1)] if projection else 0
        return _to_rotate_half(weight, heads) if heads else weight


def hf_name(gguf_name: str) -> str:
    """Hugging Face's name of a GGUF tensor; unknown names stay as they are."""
    match = _LAYER_TENSOR.fullmatch(gguf_name)
    if match and match.group(2) in _HF_LAYER_NAMES:
        return f"model.layers.{match.group(1)}.{_HF_LAYER_NAMES[match.group(2)]}.{match.group(3)}"
    stem, _, kind = gguf_name.rpartition(".")
    return f"{_HF_WHOLE_NAMES[stem]}.{kind}" if stem in _HF_WHOLE_NAMES else gguf_name


def _to_rotate_half(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of each head from interleaved pairs to halves.

    file: x0 y0 x1 y1 ...   ->   HF: x0 x1 ... y0 y1 ...
    """
    pairs = weight.view(num_heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _family(path: Path, architecture: str | None) -> ModelFamily:
    try:
        return ModelFamily(architecture)
    except ValueError:
        raise StartupError(
            f"{path}: architecture {architecture} is not supported; supported: {supported_families()}"
        ) from None


def _read_config(path: Path, metadata: GgufMetadata, weights: GgufWeights) -> ModelConfig:
    architecture = metadata.text("general.architecture")
    family = _family(path, architecture)

    def key(name: str) -> str:
        return f"{architecture}.{name}"

    num_heads = metadata.integer(key("attention.head_count"))
    hidden_size = metadata.integer(key("embedding_length"))
    head_dim = metadata.integer(key("attention.key_length"), hidden_size // max(1, num_heads))
    rotary_dim = metadata.integer(key("rope.dimension_count"), head_dim)
    if rotary_dim != head_dim:
        raise StartupError(f"{path}: rotary embedding over {rotary_dim} of {head_dim} dimensions is not supported")
    first_layer = "model.layers.0."
    return ModelConfig(
        family=family,
        vocab_size=weights.read("model.embed_tokens.weight").shape[0],
        hidden_size=hidden_size,
        intermediate_size=metadata.integer(key("feed_forward_length")),
        num_layers=metadata.integer(key("block_count")),
        num_heads=num_heads,
        num_kv_heads=metadata.integer(key("attention.head_count_kv"), num_heads),
        head_dim=head_dim,
        max_positions=metadata.integer(key("context_length")),
        rms_norm_eps=_as_written(metadata.number(key("attention.layer_norm_rms_epsilon"))),
        rope=_read_rope(path, key("rope"), metadata, weights),
        tie_word_embeddings="lm_head.weight" not in weights.names,
        eos_token_ids=eos_token_ids(metadata),
        bos_token_id=metadata.optional_integer("tokenizer.ggml.bos_token_id"),
        qkv_bias=first_layer + "self_attn.q_proj.bias" in weights.names,
        output_bias=first_layer + "self_attn.o_proj.bias" in weights.names,
        mlp_bias=first_layer + "mlp.gate_proj.bias" in weights.names,
        qk_norm=first_layer + "self_attn.q_norm.weight" in weights.names,
        sliding_window=metadata.optional_integer(key("attention.sliding_window")),
    )


def _read_rope(path: Path, prefix: str, metadata: GgufMetadata, weights: GgufWeights) -> RopeConfig:
    scaling = metadata.text(f"{prefix}.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise StartupError(f"{path}: rope scaling {scaling} is not supported; supported: none, linear, llama3")
    divisors = weights.read("rope_freqs.weight").tolist() if "rope_freqs.weight" in weights.names else []
    return RopeConfig(
        theta=metadata.number(f"{prefix}.freq_base", 10_000.0),
        linear_factor=metadata.number(f"{prefix}.scaling.factor", 1.0) if scaling == "linear" else 1.0,
        frequency_divisors=tuple(divisors),
    )


def _as_written(value: float) -> float:
    """The decimal a float32 was written from: 9.999999747378752e-06 is meant as 1e-05."""
    return float(str(np.float32(value)))

"""A GGUF file as a `Checkpoint`: shapes from its metadata, weights in Hugging Face names and row order.

Owns: the mapping of keys and tensor names, undoing llama.cpp's row order. Its tokenizer: `gguf_tokenizer`.
Source: the GGUF specification and llama.cpp's conversion (`convert_hf_to_gguf.py`: `LlamaModel.permute`).
"""

import re
from pathlib import Path

import numpy as np
import torch

from common.engine.model.checkpoint import Checkpoint
from common.engine.model.config import GenerationDefaults, ModelConfig, ModelFamily, RopeConfig, supported_families
from common.engine.model.gguf_file import GgufFile
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
    file = GgufFile(path)
    weights = GgufWeights(file)
    config = _read_config(file, weights.names)
    if config.family is ModelFamily.LLAMA:
        weights.undo_row_order(config.num_heads, config.num_kv_heads)
    return Checkpoint(
        config=config,
        weights=weights,
        tokenizer=read_tokenizer(file),
        chat_template=file.get("tokenizer.chat_template", str),
        special_tokens=special_tokens(file),
        generation=GenerationDefaults(),
    )


class GgufWeights:
    """Tensors of a GGUF file under their Hugging Face names, dequantised to float32 as they are read."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._gguf_names = {hf_name(name): name for name in file.tensor_names}
        self._heads = {"q": 0, "k": 0}

    @property
    def names(self) -> frozenset[str]:
        """All tensors; those without a Hugging Face name keep GGUF's."""
        return frozenset(self._gguf_names)

    def undo_row_order(self, num_heads: int, num_kv_heads: int) -> None:
        """From now on give q and k projections in rotate-half order; the file has pairs interleaved (llama only)."""
        self._heads = {"q": num_heads, "k": num_kv_heads}

    def read(self, name: str) -> torch.Tensor:
        """The tensor as float32 on the CPU.

        Raises:
            StartupError: it is missing, or of a quantisation the `gguf` package cannot read.
        """
        weight = self._file.read_tensor(self._gguf_names.get(name, name))
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


def _family(file: GgufFile) -> ModelFamily:
    architecture = file.require("general.architecture", str)
    try:
        return ModelFamily(architecture)
    except ValueError:
        raise StartupError(
            f"{file.path}: architecture {architecture} is not supported; supported: {supported_families()}"
        ) from None


def _read_config(file: GgufFile, names: frozenset[str]) -> ModelConfig:
    family = _family(file)

    def size(name: str, default: int | None = None) -> int:
        """A whole number from the file's keys of this family."""
        return file.require(f"{family.value}.{name}", int, default)

    num_heads = size("attention.head_count")
    hidden_size = size("embedding_length")
    head_dim = size("attention.key_length", hidden_size // max(1, num_heads))
    rotary_dim = size("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        raise StartupError(f"{file.path}: rotary embedding over {rotary_dim} of {head_dim} dimensions is not supported")
    layer = "model.layers.0."
    return ModelConfig(
        family=family,
        vocab_size=file.shape("token_embd.weight")[0],
        hidden_size=hidden_size,
        intermediate_size=size("feed_forward_length"),
        num_layers=size("block_count"),
        num_heads=num_heads,
        num_kv_heads=size("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_positions=size("context_length"),
        rms_norm_eps=_as_written(file.require(f"{family.value}.attention.layer_norm_rms_epsilon", float)),
        rope=_read_rope(file, f"{family.value}.rope"),
        tie_word_embeddings="lm_head.weight" not in names,
        eos_token_ids=eos_token_ids(file),
        bos_token_id=file.get("tokenizer.ggml.bos_token_id", int),
        qkv_bias=layer + "self_attn.q_proj.bias" in names,
        output_bias=layer + "self_attn.o_proj.bias" in names,
        mlp_bias=layer + "mlp.gate_proj.bias" in names,
        qk_norm=layer + "self_attn.q_norm.weight" in names,
        sliding_window=file.get(f"{family.value}.attention.sliding_window", int),
    )


def _read_rope(file: GgufFile, prefix: str) -> RopeConfig:
    scaling = file.get(f"{prefix}.scaling.type", str, "none")
    if scaling not in ("none", "linear"):
        raise StartupError(f"{file.path}: rope scaling {scaling} is not supported; supported: none, linear, llama3")
    divisors = file.read_tensor("rope_freqs.weight").tolist() if "rope_freqs.weight" in file.tensor_names else []
    return RopeConfig(
        theta=file.require(f"{prefix}.freq_base", float, 10_000.0),
        linear_factor=file.require(f"{prefix}.scaling.factor", float, 1.0) if scaling == "linear" else 1.0,
        frequency_divisors=tuple(divisors),
    )


def _as_written(value: float) -> float:
    """The decimal a float32 was written from: 9.999999747378752e-06 is meant as 1e-05."""
    return float(str(np.float32(value)))

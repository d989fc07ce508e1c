"""`config.json`, `generation_config.json` and `tokenizer_config.json` as typed values, and the `ModelConfig` they mean.

Owns: Hugging Face's field names and defaults, older spellings included. Does not open files.
"""

from typing import Any

import msgspec

from common.engine.model.config import (
    GenerationDefaults,
    Llama3RopeScaling,
    ModelConfig,
    ModelFamily,
    RopeConfig,
    supported_families,
)
from common.errors import StartupError


class HfRope(msgspec.Struct, frozen=True, kw_only=True):
    """`rope_parameters` (transformers 5) or `rope_scaling` (before); `type` is the oldest spelling of `rope_type`."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    partial_rotary_factor: float = 1.0


class HfConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `config.json` that the supported families read; others are ignored."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_scaling: HfRope | None = None
    rope_parameters: HfRope | None = None
    partial_rotary_factor: float = 1.0
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    attention_bias: bool | None = None
    mlp_bias: bool = False
    sliding_window: int | None = None
    use_sliding_window: bool | None = None
    max_window_layers: int | None = None
    layer_types: list[str] | None = None
    bos_token_id: int | list[int] | None = None
    eos_token_id: int | list[int] | None = None
    quantization_config: dict[str, Any] | None = None


class HfGenerationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`generation_config.json`."""

    eos_token_id: int | list[int] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


class HfAddedToken(msgspec.Struct, frozen=True, kw_only=True):
    """A special token written as an object."""

    content: str


class HfNamedTemplate(msgspec.Struct, frozen=True, kw_only=True):
    """One of several chat templates."""

    name: str
    template: str


class HfTokenizerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `tokenizer_config.json` that prompts need."""

    chat_template: str | list[HfNamedTemplate] | None = None
    bos_token: str | HfAddedToken | None = None
    eos_token: str | HfAddedToken | None = None
    unk_token: str | HfAddedToken | None = None
    pad_token: str | HfAddedToken | None = None

    def special_tokens(self) -> dict[str, str]:
        """Name to text of the tokens that are set."""
        tokens = {
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "unk_token": self.unk_token,
            "pad_token": self.pad_token,
        }
        return {
            name: token.content if isinstance(token, HfAddedToken) else token
            for name, token in tokens.items()
            if token is not None
        }

    def template(self) -> str | None:
        """The chat template; of several the one named default."""
        if isinstance(self.chat_template, list):
            return next((entry.template for entry in self.chat_template if entry.name == "default"), None)
        return self.chat_template


def to_model_config(hf: HfConfig, eos_token_ids: frozenset[int]) -> ModelConfig:
    """The decoder's shape.

    Raises:
        StartupError: a family or a feature the decoder does not compute; the message names it.
    """
    try:
        family = ModelFamily(hf.model_type)
    except ValueError:
        raise StartupError(
            f"config.json: model_type {hf.model_type} is not supported; supported: {supported_families()}"
        ) from None
    if hf.quantization_config is not None:
        raise StartupError("config.json: quantization_config is not supported; use unquantised weights or GGUF")
    if hf.hidden_act not in ("silu", "swish"):
        raise StartupError(f"config.json: hidden_act {hf.hidden_act} is not supported; supported: silu")
    bias = hf.attention_bias if hf.attention_bias is not None else family is ModelFamily.QWEN2
    return ModelConfig(
        family=family,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads or hf.num_attention_heads,
        head_dim=hf.head_dim or hf.hidden_size // max(1, hf.num_attention_heads),
        max_positions=hf.max_position_embeddings,
        rms_norm_eps=hf.rms_norm_eps,
        rope=_rope(hf),
        tie_word_embeddings=hf.tie_word_embeddings,
        eos_token_ids=eos_token_ids,
        bos_token_id=hf.bos_token_id[0] if isinstance(hf.bos_token_id, list) else hf.bos_token_id,
        qkv_bias=bias,
        output_bias=bias and family is not ModelFamily.QWEN2,
        mlp_bias=hf.mlp_bias,
        qk_norm=family is ModelFamily.QWEN3,
        sliding_window=_sliding_window(hf, family),
    )


def to_generation_defaults(hf: HfGenerationConfig) -> GenerationDefaults:
    """The authors' recommended sampling."""
    return GenerationDefaults(
        temperature=hf.temperature,
        top_p=hf.top_p,
        top_k=hf.top_k,
        min_p=hf.min_p,
        repetition_penalty=hf.repetition_penalty,
        max_new_tokens=hf.max_new_tokens,
    )


def _rope(hf: HfConfig) -> RopeConfig:
    written = hf.rope_parameters or hf.rope_scaling or HfRope()
    kind = written.rope_type or written.type or "default"
    if kind not in ("default", "linear", "llama3"):
        raise StartupError(f"config.json: rope type {kind} is not supported; supported: default, linear, llama3")
    if written.partial_rotary_factor != 1.0 or hf.partial_rotary_factor != 1.0:
        raise StartupError("config.json: partial_rotary_factor is not supported")
    theta = written.rope_theta or hf.rope_theta or 10_000.0
    if kind == "linear":
        return RopeConfig(theta=theta, linear_factor=written.factor)
    if kind == "default":
        return RopeConfig(theta=theta)
    return RopeConfig(
        theta=theta,
        llama3=Llama3RopeScaling(
            factor=written.factor,
            low_freq_factor=written.low_freq_factor,
            high_freq_factor=written.high_freq_factor,
            original_max_positions=written.original_max_position_embeddings,
        ),
    )


def _sliding_window(hf: HfConfig, family: ModelFamily) -> int | None:
    """One window for all layers, or none.

    Raises:
        StartupError: some layers have a window and others do not.
    """
    if hf.sliding_window is None or family is ModelFamily.LLAMA:
        return None
    if hf.layer_types is not None:
        windowed = sum(kind == "sliding_attention" for kind in hf.layer_types)
    elif family is ModelFamily.MISTRAL:
        windowed = hf.num_hidden_layers
    elif hf.use_sliding_window:
        windowed = max(0, hf.num_hidden_layers - (hf.max_window_layers or 0))
    else:
        windowed = 0
    if windowed not in (0, hf.num_hidden_layers):
        raise StartupError("config.json: sliding_window in some layers only is not supported")
    return hf.sliding_window if windowed else None

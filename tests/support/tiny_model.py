"""Small random models through the real classes, the same on every run and machine."""

from collections.abc import Mapping

import torch

from common.clock import ManualClock
from common.engine.chat_template import ChatTemplate
from common.engine.model.config import GenerationDefaults, ModelConfig, ModelFamily, RopeConfig
from common.engine.model.kernels import TorchKernels
from common.engine.model.llama import assemble
from common.engine.model.loaded import LoadedModel
from common.engine.model.weights import MemoryWeights
from common.engine.tokenizer import Tokenizer
from tests.support.byte_tokenizer import ByteTokenizer

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def tiny_config(
    vocab_size: int = 272,
    num_layers: int = 2,
    hidden_size: int = 32,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    max_positions: int = 2048,
    **changes: object,
) -> ModelConfig:
    """A Llama-family shape small enough for unit tests; `changes` are any other fields of `ModelConfig`."""
    fields: dict[str, object] = {
        "family": ModelFamily.LLAMA,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_positions": max_positions,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(),
        "tie_word_embeddings": True,
        "eos_token_ids": frozenset({256}),
        **changes,
    }
    return ModelConfig(**fields)  # type: ignore[arg-type]  # fields are named by the caller


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random float32 tensors of every name the config asks for; spread wide enough that greedy text is not constant."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * (0.1 if len(shape) == 1 else shape[-1] ** -0.5)
        + (1.0 if name.endswith("norm.weight") else 0.0)
        for name, shape in weight_shapes(config).items()
    }


def weight_shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Hugging Face names and shapes of every tensor of a model."""
    hidden, inner, query, kv = config.hidden_size, config.intermediate_size, config.query_size, config.kv_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        linears = {
            "self_attn.q_proj": (query, hidden, config.qkv_bias),
            "self_attn.k_proj": (kv, hidden, config.qkv_bias),
            "self_attn.v_proj": (kv, hidden, config.qkv_bias),
            "self_attn.o_proj": (hidden, query, config.output_bias),
            "mlp.gate_proj": (inner, hidden, config.mlp_bias),
            "mlp.up_proj": (inner, hidden, config.mlp_bias),
            "mlp.down_proj": (hidden, inner, config.mlp_bias),
        }
        prefix = f"model.layers.{index}."
        for name, (out_features, in_features, has_bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (out_features, in_features)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (out_features,)
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        if config.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (config.head_dim,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def tiny_model(
    vocab_size: int = 272,
    num_layers: int = 2,
    seed: int = 0,
    tokenizer: Tokenizer | None = None,
    **changes: object,
) -> LoadedModel:
    """A random float32 CPU model over a `ByteTokenizer` (261 tokens; the other logits up to `vocab_size` are padding).

    Equal arguments give equal weights. `changes` go to `tiny_config`.
    """
    chosen = tokenizer or ByteTokenizer()
    config = tiny_config(vocab_size, num_layers, **{"eos_token_ids": chosen.eos_token_ids, **changes})  # type: ignore[arg-type]  # named by the caller
    device = torch.device("cpu")
    kernels = TorchKernels(device, torch.float32)
    assembled = assemble(
        config, MemoryWeights(random_weights(config, seed)), kernels, device=device, dtype=torch.float32
    )
    return LoadedModel(
        config=config,
        model=assembled.model,
        tokenizer=chosen,
        chat_template=ChatTemplate(CHAT_TEMPLATE, {"eos_token": "<|end|>"}, ManualClock(0.0)),
        generation=GenerationDefaults(),
        tensors_fingerprint=assembled.tensors_fingerprint,
        kernels=kernels.name,
    )

"""The decoder of the Llama family: embeddings, layers of attention and gated feed-forward, final norm, logits.

Journey row 8 (and 3b on P). Owns: the order of computation. Does not know files, requests, or how linear maps and
attention are computed (`kernels.KernelBackend`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 -- torch's own name for it

from common.engine.model.attention import Attention
from common.engine.model.config import ModelConfig
from common.engine.model.forward import ForwardBatch
from common.engine.model.kernels import KernelBackend
from common.engine.model.layers import Linear, RmsNorm
from common.engine.model.rotary import RotaryEmbedding, Rotation, rotate
from common.engine.model.weights import CheckedWeights, WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """One layer's parts. `qkv` and `gate_up` are several projections of the checkpoint stacked into one.

    query_norm, key_norm: over head_dim, where the family has them.
    """

    input_norm: RmsNorm
    qkv: Linear
    query_norm: RmsNorm | None
    key_norm: RmsNorm | None
    output: Linear
    post_norm: RmsNorm
    gate_up: Linear
    down: Linear


class LlamaModel:
    """A decoder of the Llama family (`common.engine.model.forward.DecoderModel`).

    One forward at a time: the attention object keeps the plan of the current batch.

    Args:
        config: its shape.
        embedding: `[vocab_size, hidden_size]` in the computation dtype, on the model's device.
        layers: from first to last.
        final_norm: before the logits.
        head: hidden to logits.
        attention: writes and reads the KV cache.
    """

    def __init__(
        self,
        config: ModelConfig,
        embedding: torch.Tensor,
        layers: tuple[DecoderLayer, ...],
        final_norm: RmsNorm,
        head: Linear,
        attention: Attention,
    ) -> None:
        self.config = config
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._head = head
        self._attention = attention
        self._rotary = RotaryEmbedding(config, embedding.device)

    @property
    def device(self) -> torch.device:
        """Where batches and the KV cache must be."""
        return self._embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and of the KV cache."""
        return self._embedding.dtype

    @torch.no_grad()  # not inference_mode: the caller may change the logits in place
    def forward(self, batch: ForwardBatch, kv_cache: torch.Tensor) -> torch.Tensor:
        """Write K and V of the batch into `kv_cache` and return next-token logits.

        Args:
            batch: the step's tokens.
            kv_cache: `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`; changed in place.

        Returns:
            float32 `[num_logits, vocab_size]`.
        """
        hidden = F.embedding(batch.token_ids, self._embedding)
        rotation = self._rotary.rotation(batch.positions, self.dtype)
        for index, layer in enumerate(self._layers):
            hidden = hidden + self._attend(index, layer, hidden, rotation, batch, kv_cache)
            gate, up = layer.gate_up(layer.post_norm(hidden)).chunk(2, dim=-1)
            hidden = hidden + layer.down(F.silu(gate) * up)
        wanted = self._final_norm(hidden[batch.logits_indices])
        return self._head(wanted).to(torch.float32)

    def _attend(
        self,
        index: int,
        layer: DecoderLayer,
        hidden: torch.Tensor,
        rotation: Rotation,
        batch: ForwardBatch,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor:
        """The attention half of one layer, `[num_tokens, hidden_size]`, without the residual."""
        config = self.config
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        heads = layer.qkv(layer.input_norm(hidden)).view(hidden.shape[0], -1, config.head_dim)
        query_key, value = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = query_key[:, :num_heads], query_key[:, num_heads:]
            query_key = torch.cat((layer.query_norm(query), layer.key_norm(key)), dim=1)
        rotated = rotate(query_key, rotation)
        query, key = rotated[:, :num_heads], rotated[:, num_heads:]
        return layer.output(self._attention.attend(query, key, value, index, batch, kv_cache))


@dataclass(frozen=True, slots=True)
class AssembledModel:
    """A decoder and the fingerprint of the weights it was made of."""

    model: LlamaModel
    tensors_fingerprint: str


def assemble(
    config: ModelConfig, source: WeightSource, kernels: KernelBackend, *, device: torch.device, dtype: torch.dtype
) -> AssembledModel:
    """Read every tensor the config asks for and build the decoder.

    Args:
        config: the shape the weights must have.
        source: where they come from.
        kernels: makes linear maps and attention.
        device: of the model.
        dtype: of activations.

    Raises:
        StartupError: a tensor is missing or has another shape.
    """
    weights = CheckedWeights(source)

    def norm(name: str, size: int) -> RmsNorm:
        """The norm with this weight, on the device."""
        return RmsNorm(weights.take(name, [size]).to(device, dtype), config.rms_norm_eps)

    embedding = weights.take("model.embed_tokens.weight", [config.vocab_size, config.hidden_size])
    layers = tuple(_assemble_layer(config, index, weights, kernels, norm) for index in range(config.num_layers))
    final_norm = norm("model.norm.weight", config.hidden_size)
    head = embedding
    if not config.tie_word_embeddings:
        head = weights.take("lm_head.weight", [config.vocab_size, config.hidden_size])
    model = LlamaModel(
        config,
        embedding.to(device, dtype),
        layers,
        final_norm,
        kernels.linear(head, None),
        kernels.attention(config),
    )
    return AssembledModel(model, weights.fingerprint())


def _assemble_layer(
    config: ModelConfig,
    index: int,
    weights: CheckedWeights,
    kernels: KernelBackend,
    norm: Callable[[str, int], RmsNorm],
) -> DecoderLayer:
    prefix = f"model.layers.{index}."
    hidden, query, kv, inner = config.hidden_size, config.query_size, config.kv_size, config.intermediate_size

    def stacked(parts: dict[str, int], in_features: int, *, has_bias: bool) -> Linear:
        """One projection out of several with the same input, their rows one below the other."""
        weight = [weights.take(f"{prefix}{name}.weight", [size, in_features]) for name, size in parts.items()]
        bias = [weights.take(f"{prefix}{name}.bias", [size]) for name, size in parts.items()] if has_bias else []
        return kernels.linear(torch.cat(weight), torch.cat(bias) if bias else None)

    return DecoderLayer(
        input_norm=norm(prefix + "input_layernorm.weight", hidden),
        qkv=stacked(
            {"self_attn.q_proj": query, "self_attn.k_proj": kv, "self_attn.v_proj": kv},
            hidden,
            has_bias=config.qkv_bias,
        ),
        query_norm=norm(prefix + "self_attn.q_norm.weight", config.head_dim) if config.qk_norm else None,
        key_norm=norm(prefix + "self_attn.k_norm.weight", config.head_dim) if config.qk_norm else None,
        output=stacked({"self_attn.o_proj": hidden}, query, has_bias=config.output_bias),
        post_norm=norm(prefix + "post_attention_layernorm.weight", hidden),
        gate_up=stacked({"mlp.gate_proj": inner, "mlp.up_proj": inner}, hidden, has_bias=config.mlp_bias),
        down=stacked({"mlp.down_proj": hidden}, inner, has_bias=config.mlp_bias),
    )

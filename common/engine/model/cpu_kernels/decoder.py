"""The Llama family's forward as one C++ call per step (`common.engine.model.forward.DecoderModel`).

Journey row 8 (and 3b on P). Owns: packed weights of a model, rotary tables, pointers of a step. Python does no work per
layer. Does not know files or requests. Takes weights in the order `llama.assemble` does: equal fingerprints.
"""

import ctypes
import weakref

import torch

from common.engine.model.config import ModelConfig
from common.engine.model.cpu_kernels.library import Cache, DecoderShape, LayerWeights, Packed, Step, load_library
from common.engine.model.cpu_kernels.packed import (
    GROUP_SIZE,
    Arena,
    PackedFormat,
    PackedLinear,
    WeightDtype,
    formats_for,
    packed_bytes_bound,
)
from common.engine.model.cpu_kernels.threads import Threads, default_num_threads
from common.engine.model.forward import ForwardBatch
from common.engine.model.rotary import rotary_frequencies
from common.engine.model.weights import CheckedWeights, WeightSource
from common.errors import Bug

MAX_HEAD_DIM = 512
FAULTS = {
    1: "a token id is outside the vocabulary",
    2: "a position is outside the model's range",
    3: "a slot is outside the KV cache",
    4: "a block id is outside the KV cache",
    5: "a sequence's length does not fit its tokens or its block table",
    6: "a logits index is outside the batch",
}


def unsupported_reason(config: ModelConfig) -> str | None:
    """Why the kernels cannot compute this shape, or None when they can."""
    widths = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "query width": config.query_size,
    }
    for name, width in widths.items():
        if width % GROUP_SIZE:
            return f"{name} {width} is not a multiple of {GROUP_SIZE}"
    if config.head_dim > MAX_HEAD_DIM:
        return f"head_dim {config.head_dim} is above {MAX_HEAD_DIM}"
    return None


class CpuDecoder:
    """A Llama-family decoder in C++; float32 activations, weights as `weight_dtype`.

    A token's logits are the same bits whatever shares its batch, however its prompt was chunked, and for any number of
    threads. One forward at a time (a second caller waits).

    Args:
        config: the shape; `unsupported_reason(config)` must be None.
        weights: taken tensor by tensor; nothing of it is kept.
        weight_dtype: storage. int8 keeps matrices that already are on a 4- or 8-bit grid (Q4_1, Q8_0) exactly so.
        num_threads: including the caller; 0 is one per physical core.
        tiles: multiply on the tile unit, or by vectors; None: the tile unit where there is one. Float32 has one way.

    Raises:
        CannotBuild: there is no library.
        StartupError: a tensor is missing or has another shape.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: CheckedWeights,
        weight_dtype: WeightDtype = "float32",
        num_threads: int = 0,
        *,
        tiles: bool | None = None,
    ) -> None:
        self.config = config
        self.weight_dtype = weight_dtype
        self.num_threads = num_threads or default_num_threads()
        self._library = load_library()
        self._packer = _Packer(config, weights, formats_for(weight_dtype, tiles=tiles), Threads(self.num_threads))
        self._handle = self._make()
        weakref.finalize(self, self._library.pd_decoder_free, self._handle)

    @property
    def device(self) -> torch.device:
        """Where batches and the KV cache must be."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Of the KV cache (float32 or bfloat16 are taken, this is the default).

        int8's is bfloat16: beside weights of 4 or 8 bits K and V in float32 would be most of what a step reads.
        """
        return torch.float32 if self.weight_dtype == "float32" else torch.bfloat16

    @property
    def weight_bytes(self) -> int:
        """What a decode step has to read: all packed matrices, each once."""
        return self._packer.arena.used_bytes

    def forward(self, batch: ForwardBatch, kv_cache: torch.Tensor) -> torch.Tensor:
        """Write K and V of the batch into `kv_cache` and return next-token logits.

        Args:
            batch: the step's tokens.
            kv_cache: float32 or bfloat16 `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`, contiguous;
                changed in place.

        Returns:
            float32 `[num_logits, vocab_size]`.

        Raises:
            Bug: an index of the batch is out of range; the cache is then unchanged.
        """
        cache = self._cache_struct(kv_cache)
        tables = batch.block_tables.contiguous()
        num_seqs = len(batch.seq_lens)
        query_start = (ctypes.c_int64 * (num_seqs + 1))(*batch.query_start)
        seq_lens = (ctypes.c_int64 * max(1, num_seqs))(*batch.seq_lens)
        tensors = [
            tensor.contiguous()
            for tensor in (batch.token_ids, batch.positions, batch.slot_mapping, batch.logits_indices)
        ]
        logits = torch.empty((tensors[3].numel(), self.config.vocab_size), dtype=torch.float32)
        step = Step(
            *(tensor.data_ptr() for tensor in tensors),
            tables.data_ptr(),
            ctypes.addressof(query_start),
            ctypes.addressof(seq_lens),
            tensors[0].numel(),
            num_seqs,
            tables.shape[1] if num_seqs else 0,
            logits.shape[0],
            None if batch.highest is None else batch.highest.data_ptr(),
        )
        fault = self._library.pd_decoder_forward(
            self._handle, ctypes.byref(step), ctypes.byref(cache), logits.data_ptr()
        )
        if fault:
            raise Bug(f"forward batch: {FAULTS[fault]}")
        return logits

    def _cache_struct(self, kv_cache: torch.Tensor) -> Cache:
        config = self.config
        num_blocks, num_layers, two, block_size, num_kv_heads, head_dim = kv_cache.shape
        expected = (config.num_layers, 2, config.num_kv_heads, config.head_dim)
        if (num_layers, two, num_kv_heads, head_dim) != expected or not kv_cache.is_contiguous():
            raise Bug(f"kv cache of shape {list(kv_cache.shape)} does not fit the model, or is not contiguous")
        if kv_cache.dtype not in (torch.float32, torch.bfloat16):
            raise Bug(f"kv cache of {kv_cache.dtype}: the CPU kernels take float32 and bfloat16")
        is_bf16 = kv_cache.dtype == torch.bfloat16
        return Cache(kv_cache.data_ptr(), is_bf16, num_layers, block_size, num_kv_heads, head_dim, num_blocks)

    def _make(self) -> ctypes.c_void_p:
        config, packer = self.config, self._packer
        embedding = packer.take_embedding()
        layers = (LayerWeights * config.num_layers)(*(packer.take_layer(i) for i in range(config.num_layers)))
        final_norm = packer.take_vector("model.norm.weight", config.hidden_size)
        head = embedding if config.tie_word_embeddings else packer.take_matrix("lm_head", config.vocab_size)
        angles = torch.arange(config.max_positions, dtype=torch.float32)[:, None] * rotary_frequencies(config)
        cos, sin = packer.keep(angles.cos()), packer.keep(angles.sin())
        shape = DecoderShape(
            num_layers=config.num_layers,
            hidden=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate=config.intermediate_size,
            vocab=config.vocab_size,
            max_positions=config.max_positions,
            window=config.sliding_window or 0,
            norm_eps=config.rms_norm_eps,
            attention_scale=config.head_dim**-0.5,
        )
        made = self._library.pd_decoder_new(
            ctypes.byref(shape),
            layers,
            ctypes.byref(embedding),
            ctypes.byref(head),
            final_norm,
            cos,
            sin,
            self.num_threads,
        )
        return ctypes.c_void_p(made)


class _Packer:
    """Takes tensors by name, packs them into one arena, and keeps everything the C++ side points to alive."""

    def __init__(
        self, config: ModelConfig, weights: CheckedWeights, formats: tuple[PackedFormat, ...], threads: Threads
    ) -> None:
        self._config = config
        self._weights = weights
        self._formats = formats
        self._threads = threads
        self._alive: list[object] = []
        self.arena = Arena(_arena_bytes(config, self._formats))

    def keep(self, tensor: torch.Tensor) -> int:
        """The address of a float32 copy that stays."""
        kept = tensor.to(torch.float32, copy=True).contiguous()
        self._alive.append(kept)
        return kept.data_ptr()

    def take_vector(self, name: str, size: int) -> int:
        """The address of a norm's weight."""
        return self.keep(self._weights.take(name, [size]))

    def take_embedding(self) -> Packed:
        """Token embeddings, also the head where they are tied."""
        return self._pack([self._embedding()], [], paired=False)

    def _embedding(self) -> torch.Tensor:
        return self._weights.take("model.embed_tokens.weight", [self._config.vocab_size, self._config.hidden_size])

    def take_matrix(self, name: str, rows: int) -> Packed:
        """A matrix that is alone and has no bias."""
        return self._pack([self._weights.take(f"{name}.weight", [rows, self._config.hidden_size])], [], paired=False)

    def take_layer(self, index: int) -> LayerWeights:
        """All of one layer."""
        config, prefix = self._config, f"model.layers.{index}."
        hidden, query, kv, inner = config.hidden_size, config.query_size, config.kv_size, config.intermediate_size
        layer = LayerWeights()
        layer.attention_norm = self.take_vector(prefix + "input_layernorm.weight", hidden)
        layer.qkv = self._stacked(
            {f"{prefix}self_attn.{part}_proj": size for part, size in (("q", query), ("k", kv), ("v", kv))},
            hidden,
            has_bias=config.qkv_bias,
        )
        if config.qk_norm:
            layer.q_norm = self.take_vector(prefix + "self_attn.q_norm.weight", config.head_dim)
            layer.k_norm = self.take_vector(prefix + "self_attn.k_norm.weight", config.head_dim)
        layer.output = self._stacked({f"{prefix}self_attn.o_proj": hidden}, query, has_bias=config.output_bias)
        layer.mlp_norm = self.take_vector(prefix + "post_attention_layernorm.weight", hidden)
        gate_up = {f"{prefix}mlp.gate_proj": inner, f"{prefix}mlp.up_proj": inner}
        layer.gate_up = self._stacked(gate_up, hidden, has_bias=config.mlp_bias, paired=True)
        layer.down = self._stacked({f"{prefix}mlp.down_proj": hidden}, inner, has_bias=config.mlp_bias)
        return layer

    def _stacked(self, parts: dict[str, int], inputs: int, *, has_bias: bool, paired: bool = False) -> Packed:
        weights = [self._weights.take(f"{name}.weight", [rows, inputs]) for name, rows in parts.items()]
        biases = [self._weights.take(f"{name}.bias", [rows]) for name, rows in parts.items()] if has_bias else []
        return self._pack(weights, biases, paired=paired)

    def _pack(self, weights: list[torch.Tensor], biases: list[torch.Tensor], *, paired: bool) -> Packed:
        weight = torch.cat([part.to(torch.float32) for part in weights]) if len(weights) > 1 else weights[0]
        bias = torch.cat(biases) if biases else None
        packed = PackedLinear(weight, bias, self._formats, self._threads, paired=paired, arena=self.arena)
        self._alive.append(packed)
        return packed.struct


def _arena_bytes(config: ModelConfig, formats: tuple[PackedFormat, ...]) -> int:
    hidden, query, kv, inner = config.hidden_size, config.query_size, config.kv_size, config.intermediate_size
    layer = sum(
        packed_bytes_bound(*matrix, formats) for matrix in ((query + 2 * kv, hidden), (hidden, query), (hidden, inner))
    )
    layer += packed_bytes_bound(2 * inner, hidden, formats, paired=True)
    ends = packed_bytes_bound(config.vocab_size, hidden, formats) * (1 if config.tie_word_embeddings else 2)
    return layer * config.num_layers + ends


def assemble_cpu(
    config: ModelConfig,
    source: WeightSource,
    *,
    weight_dtype: WeightDtype,
    num_threads: int,
    tiles: bool | None = None,
) -> tuple[CpuDecoder, str]:
    """Read every tensor the config asks for and build the decoder (arguments: see `CpuDecoder`).

    Returns:
        The decoder and the fingerprint of its weights, equal to `llama.assemble`'s for the same source.

    Raises:
        CannotBuild, StartupError: see `CpuDecoder`.
    """
    weights = CheckedWeights(source)
    decoder = CpuDecoder(config, weights, weight_dtype, num_threads, tiles=tiles)
    return decoder, weights.fingerprint()

"""A model ready to serve: the decoder and everything that belongs to it.

Owns: the value `load_model` returns. Does not know where it came from.
"""

import hashlib
from dataclasses import dataclass
from typing import Protocol

import torch

from common.engine.chat_template import ChatTemplate
from common.engine.model.config import GenerationDefaults, ModelConfig
from common.engine.model.forward import DecoderModel
from common.engine.model.rotary import rotary_frequencies
from common.engine.tokenizer import Tokenizer
from common.errors import ConfigError

_KV_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PlacedDecoder(DecoderModel, Protocol):
    """A decoder that says where and in what its KV cache must be."""

    @property
    def device(self) -> torch.device:
        """Of batches and the KV cache."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the KV cache, unless a config says otherwise."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What a role's `main.py` gets from a model path.

    The KV cache must be of `kv_cache_dtype(...)` on `model.device`: `[num_blocks, num_layers, 2, block_size,
    num_kv_heads, head_dim]` (`common.engine.model.forward`).

    Attributes:
        generation: the sampling its authors recommend.
        tensors_fingerprint: of the weights alone (`weights.CheckedWeights`).
        kernels: who computes: `cpu` (the compiled kernels), `flashinfer`, `triton` or `torch`.
        kernels_note: why better kernels are not in use although `auto` would have taken them; one line to log.
    """

    config: ModelConfig
    model: PlacedDecoder
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    generation: GenerationDefaults
    tensors_fingerprint: str
    kernels: str
    kernels_note: str | None = None

    @property
    def can_record_decodes(self) -> bool:
        """Whether attention of recorded batches reads all that changes from the device."""
        return self.kernels in ("flashinfer", "triton")

    def kv_cache_dtype(self, asked: str) -> torch.dtype:
        """What K and V are kept in (vLLM's option of this name).

        Args:
            asked: `auto` (the decoder's own), `float32` or `bfloat16`.

        Raises:
            ConfigError: these kernels cannot keep it so.
        """
        own = self.model.dtype
        wanted = _KV_DTYPES.get(asked, own)
        if wanted != own and self.kernels != "cpu":
            raise ConfigError(
                f"kv_cache_dtype: {asked} needs the compiled kernels of the CPU; {self.kernels} keeps K and V in "
                f"{str(own).removeprefix('torch.')}; use auto"
            )
        return wanted

    @property
    def weights_fingerprint(self) -> str:
        """Of the weights and of every constant that changes K or V: the same for a GGUF file and its exported folder.

        Rotary frequencies count to four digits: formats store llama3 scaling in different roundings.
        """
        config = self.config
        shape = (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim)
        constants = (config.rms_norm_eps, config.sliding_window, config.qk_norm)
        frequencies = [f"{frequency:.3e}" for frequency in rotary_frequencies(config).tolist()]
        described = repr((self.tensors_fingerprint, shape, constants, frequencies))
        return hashlib.sha256(described.encode()).hexdigest()[:16]

    @property
    def fingerprint(self) -> str:
        """Equal on two engines that would compute the same KV and render the same prompts; 16 hex digits."""
        parts = (self.weights_fingerprint, self.tokenizer.fingerprint, self.chat_template.fingerprint)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

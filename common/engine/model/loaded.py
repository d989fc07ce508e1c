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
from common.engine.tokenizer import Tokenizer


class PlacedDecoder(DecoderModel, Protocol):
    """A decoder that says where and in what its KV cache must be."""

    @property
    def device(self) -> torch.device:
        """Of batches and the KV cache."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the KV cache."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What a role's `main.py` gets from a model path.

    The KV cache must be of `model.dtype` on `model.device`: `[num_blocks, num_layers, 2, block_size, num_kv_heads,
    head_dim]` (`common.engine.model.forward`).

    Attributes:
        generation: the sampling its authors recommend.
        weights_fingerprint: of config and weights, the same for a GGUF file and its exported folder.
        kernels: who computes: `cpu` (the compiled kernels) or `torch`.
        kernels_note: why the compiled kernels are not in use although `auto` would have taken them; one line to log.
    """

    config: ModelConfig
    model: PlacedDecoder
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    generation: GenerationDefaults
    weights_fingerprint: str
    kernels: str
    kernels_note: str | None = None

    @property
    def fingerprint(self) -> str:
        """Equal on two engines that would compute the same KV and render the same prompts; 16 hex digits."""
        parts = (self.weights_fingerprint, self.tokenizer.fingerprint, self.chat_template.fingerprint)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

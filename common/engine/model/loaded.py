"""A model ready to serve: the decoder and everything that belongs to it.

Owns: the value `load_model` returns. Does not know where it came from.
"""

import hashlib
from dataclasses import dataclass

from common.engine.chat_template import ChatTemplate
from common.engine.model.config import GenerationDefaults, ModelConfig
from common.engine.model.llama import LlamaModel
from common.engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What a role's `main.py` gets from a model path.

    The KV cache must be of `model.dtype` on `model.device`: `[num_blocks, num_layers, 2, block_size, num_kv_heads,
    head_dim]` (`common.engine.model.forward`).

    Attributes:
        generation: the sampling its authors recommend.
        weights_fingerprint: of config and weights, the same for a GGUF file and its exported folder.
        kernels: name of the kernel backend in use.
    """

    config: ModelConfig
    model: LlamaModel
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    generation: GenerationDefaults
    weights_fingerprint: str
    kernels: str

    @property
    def fingerprint(self) -> str:
        """Equal on two engines that would compute the same KV and render the same prompts; 16 hex digits."""
        parts = (self.weights_fingerprint, self.tokenizer.fingerprint, self.chat_template.fingerprint)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

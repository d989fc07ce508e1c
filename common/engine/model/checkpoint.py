"""What a model on disk contains, whatever its format: the value both readers return.

Owns: the value. Does not know GGUF or Hugging Face files.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from common.engine.model.config import GenerationDefaults, ModelConfig
from common.engine.model.weights import WeightSource
from common.engine.tokenizer import HfTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Everything read from one model path; tensors are read later, one by one.

    Attributes:
        chat_template: Jinja text, or None.
        special_tokens: `bos_token`, `eos_token`, ... to their text, for the template.
    """

    config: ModelConfig
    weights: WeightSource
    tokenizer: HfTokenizer
    chat_template: str | None
    special_tokens: Mapping[str, str]
    generation: GenerationDefaults

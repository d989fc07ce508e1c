"""What a decoder looks like: `ModelConfig`, read by `hf_reader` and `gguf_reader`, obeyed by `llama`.

Owns: the frozen shape description of the supported families. Does not know files or tensors.
"""

from dataclasses import dataclass, field
from enum import Enum

from common.errors import StartupError


class ModelFamily(Enum):
    """Architectures the decoder computes. SmolLM and SmolLM2 are LLAMA."""

    LLAMA = "llama"
    MISTRAL = "mistral"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"


def supported_families() -> str:
    """For messages: the families by name."""
    return ", ".join(family.value for family in ModelFamily)


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3RopeScaling:
    """Llama 3.1's stretching of low rotary frequencies.

    Source: Llama 3.1 release, `rope_type: llama3` of the Hugging Face config format.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding over the whole head.

    Attributes:
        theta: base of the frequencies.
        linear_factor: positions are divided by it; 1.0 leaves them.
        llama3: frequency-dependent stretching, or None.
        frequency_divisors: one per frequency (`head_dim / 2`), as GGUF stores llama3 scaling; empty when there is none.
    """

    theta: float = 10_000.0
    linear_factor: float = 1.0
    llama3: Llama3RopeScaling | None = None
    frequency_divisors: tuple[float, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and constants of one decoder.

    Attributes:
        max_positions: longest sequence the model was made for, tokens.
        qkv_bias: biases on the query, key and value projections.
        output_bias: bias on the attention output projection.
        mlp_bias: biases in the feed-forward.
        qk_norm: RMS norm over the head dimension of queries and keys before the rotary embedding.
        sliding_window: a token sees only this many last tokens, itself included; None sees all.
        eos_token_ids: from the generation config, all of them.
    """

    family: ModelFamily
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    eos_token_ids: frozenset[int]
    bos_token_id: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        """Refuse shapes that no decoder can have.

        Raises:
            StartupError: a size is not positive, or the heads do not share evenly.
        """
        sizes = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_positions": self.max_positions,
        }
        for name, value in sizes.items():
            if value < 1:
                raise StartupError(f"model config: {name} is {value}, must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise StartupError(
                f"model config: {self.num_heads} query heads do not share {self.num_kv_heads} KV heads evenly"
            )
        if self.head_dim % 2:
            raise StartupError(f"model config: head_dim is {self.head_dim}, rotary embedding needs an even one")

    @property
    def query_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Sampling the model's authors recommend (`generation_config.json`); None where they say nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None

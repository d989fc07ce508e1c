"""Sampling parameters as a request wrote them, and what they are checked against.

Owns: two frozen values between the HTTP layer and `common.engine.sampling.validation`. Field names are vLLM's/OpenAI's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from common.engine.sampling.processors.processor import LogitsProcessor
from common.engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class RawSampling:
    """Typed but unchecked; None where the body is silent or says null.

    Those that are not plain copies of a body field:
        logprobs: completions: the number; chat: `top_logprobs` (or True) where `logprobs` is true, else None.
        vllm_xargs: arguments for custom logits processors.
    """

    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    min_completion_tokens: int | None = None
    logprobs: int | bool | None = None
    prompt_logprobs: int | bool | None = None
    logprob_token_ids: tuple[int, ...] | None = None
    logit_bias: Mapping[str, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] | None = None
    thinking_token_budget: int | None = None
    repetition_detection: Mapping[str, int] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    use_beam_search: bool | None = None
    detokenize: bool | None = None
    vllm_xargs: Mapping[str, object] | None = None

    def filled_from(self, defaults: "RawSampling") -> "RawSampling":
        """These values, with `defaults` where they are None."""
        values = {
            entry.name: getattr(self if getattr(self, entry.name) is not None else defaults, entry.name)
            for entry in fields(self)
        }
        return RawSampling(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingLimits:
    """Longest lists and highest counts a request may ask for.

    Attributes:
        max_n: choices of one request.
        max_logprobs: alternatives per position; -1 is the whole vocabulary.
        max_stop_strings: stop strings; their characters together at most `max_stop_chars`.
        max_stop_token_ids: stop token ids.
        max_logit_bias: biased tokens.
        max_logprob_token_ids: tokens whose log probability is asked for.
        max_bad_words: token sequences after tokenising (both spacings count).
        max_bad_word_tokens: tokens of all of them.
        max_pattern_tokens: of `repetition_detection`: pattern size times count.
    """

    max_n: int = 128
    max_logprobs: int = 20
    max_stop_strings: int = 64
    max_stop_chars: int = 8192
    max_stop_token_ids: int = 256
    max_logit_bias: int = 1024
    max_logprob_token_ids: int = 128
    max_bad_words: int = 128
    max_bad_word_tokens: int = 1024
    max_pattern_tokens: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingContext:
    """What this engine's parameters are checked against; made once at the start.

    Attributes:
        tokenizer: for `bad_words`, and for the ids that end an output.
        vocab_size: ids a request may name are below it.
        max_model_len_tokens: prompt and output together.
        has_thinking: whether the model has thinking markers (`OutputMarkers`).
        defaults: what the model's generation config recommends.
        limits: the longest lists.
        processors: custom processors; each may refuse a request.
    """

    tokenizer: Tokenizer
    vocab_size: int
    max_model_len_tokens: int
    has_thinking: bool = False
    defaults: RawSampling = field(default_factory=RawSampling)
    limits: SamplingLimits = field(default_factory=SamplingLimits)
    processors: tuple[type[LogitsProcessor], ...] = ()

"""Sampling parameters of one request, as vLLM 0.32 names them (its `SamplingParams`).

Owns: the frozen value. Normalising and checking against a vocabulary: `common.engine.sampling.validation`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What to sample. Values here are already normalised and checked (`validation.normalise`).

    Attributes follow vLLM 0.32; those that differ say so.
        seed: 64-bit; None draws one at admission, so that noise is always a function of a seed.
        stop: stop strings; text is held back up to the longest of them.
        stop_token_ids: token ids that end the output and are not part of the text.
        max_tokens: at least 1, filled from the context length where the request gave none.
        logprobs: how many alternatives beside the sampled token; None is off; -1 the whole vocabulary.
        ignore_stops: P only (DESIGN §3): neither EOS nor stops end the request, so a prompt whose first token is a
            stop still hands its KV over.
        bad_words_token_ids: `bad_words` in both spacings, as token ids.
        extra_args: `vllm_xargs`, for custom logits processors.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    ignore_stops: bool = False
    max_tokens: int = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    thinking_token_budget: int | None = None
    repetition_detection: "RepetitionDetection | None" = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    extra_args: Mapping[str, object] = field(default_factory=dict, hash=False)

    @property
    def is_greedy(self) -> bool:
        """Whether the highest logit wins."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionDetection:
    """End a request that repeats itself: a pattern of min..max tokens seen `min_count` times in a row (vLLM 0.32)."""

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2

"""What is measured: parameters, batch shapes, and the logits file both samplers read.

Knows neither sampler, and imports nothing but numpy, so that the peer's interpreter can load it too.
"""

import time
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

SEED = 20240
PROMPT_TOKENS = 512


@dataclass(frozen=True)
class Shape:
    """Of one step."""

    batch_size: int
    vocab_size: int
    output_tokens: int


@dataclass(frozen=True)
class Case:
    """Parameters every row of the batch has, by vLLM's names; `logit_bias` etc. are made to fit the vocabulary."""

    name: str
    params: dict[str, float] = field(default_factory=dict)
    seeded: bool = False
    num_biased: int = 0
    num_allowed: int = 0
    num_bad_words: int = 0
    greedy_every: int = 0
    allowed_share: float = 0.0
    num_reported: int = 0
    thinking_budget: int | None = None

    def token_ids(self, count: int, vocab_size: int) -> list[int]:
        """`count` distinct tokens of the vocabulary, the same for both samplers."""
        picked = np.random.default_rng(SEED).choice(vocab_size, count, replace=False)
        return [int(token) for token in picked]

    def bitmask(self, shape: Shape) -> "np.ndarray[tuple[int, int], np.dtype[np.int32]]":
        """A mask for every row, int32 [batch_size, ceil(vocab_size / 32)]: `allowed_share` of the bits are set."""
        width = -(-shape.vocab_size // 32) * 32
        allowed = np.random.default_rng(SEED).random((shape.batch_size, width)) < self.allowed_share
        return np.packbits(allowed, axis=1, bitorder="little").view(np.int32)


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}

_PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1}
_ALL = {**_PENALTIES, "temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02, "min_tokens": 4000, "logprobs": 5}

CASES = {
    case.name: case
    for case in (
        Case("greedy", {"temperature": 0.0}),
        Case("random", {"temperature": 1.0}),
        Case("temperature", {"temperature": 0.8}),
        Case("mixed", {"temperature": 0.8}, greedy_every=2),
        Case("seeded", {"temperature": 0.8}, seeded=True),
        Case("top_k", {"temperature": 0.8, "top_k": 50}),
        Case("top_p", {"temperature": 0.8, "top_p": 0.9}),
        Case("top_k+top_p", {"temperature": 0.8, "top_k": 50, "top_p": 0.9}),
        Case("min_p", {"temperature": 0.8, "min_p": 0.05}),
        Case("repetition", {"temperature": 0.0, "repetition_penalty": 1.1}),
        Case("frequency", {"temperature": 0.0, "frequency_penalty": 0.2}),
        Case("presence", {"temperature": 0.0, "presence_penalty": 0.1}),
        Case("penalties", {"temperature": 0.0, **_PENALTIES}),
        Case("logit_bias", {"temperature": 0.0}, num_biased=50),
        Case("allowed_token_ids", {"temperature": 0.0}, num_allowed=1000),
        Case("bad_words", {"temperature": 0.0}, num_bad_words=20),
        Case("min_tokens", {"temperature": 0.0, "min_tokens": 4000}),
        Case("logprobs", {"temperature": 0.0, "logprobs": 5}),
        Case("logprob_token_ids", {"temperature": 0.0}, num_reported=10),
        Case("thinking_token_budget", {"temperature": 0.0}, thinking_budget=1 << 19),
        Case("mask", {"temperature": 0.0}, allowed_share=0.02),
        Case("mask+temperature", {"temperature": 0.8}, allowed_share=0.02),
        Case("all", _ALL, seeded=True, num_biased=50, num_bad_words=20),
    )
}


def write_logits(path: Path, batch_size: int, vocab_size: int, kind: str) -> None:
    """Float32 [batch_size, vocab_size] as .npy.

    peaked: Zipf-like over ranks in random order with noise, about what a language model gives;
    flat: normal, where a nucleus is most of the vocabulary.
    """
    rng = np.random.default_rng(SEED)
    logits = rng.standard_normal((batch_size, vocab_size), dtype=np.float32)
    if kind == "peaked":
        ranked = (-1.8 * np.log(np.arange(1, vocab_size + 1))).astype(np.float32)
        for row in logits:
            row *= 0.3
            row += rng.permutation(ranked)
    np.save(path, logits)


def thinking_markers(vocab_size: int) -> tuple[int, int]:
    """Tokens that open and close a thinking section."""
    return vocab_size - 1, vocab_size - 2


@lru_cache(maxsize=1024)
def history(row: int, count: int, vocab_size: int) -> list[int]:
    """Tokens a row has seen: Zipf-like, as text repeats itself."""
    drawn = np.random.default_rng([SEED, row]).zipf(1.3, count) * 7919 % vocab_size
    return [int(token) for token in drawn]

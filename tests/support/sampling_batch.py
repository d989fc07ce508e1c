"""Requests for sampler tests, and rows of random parameters."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from common.engine.sampling.batch_state import AddedRow, BatchUpdate
from common.engine.sampling.params import SamplingParams
from common.engine.sampling.sampler import LogprobsMode, Sampler
from common.ids import RequestId

CPU = torch.device("cpu")


def added(row: int, params: SamplingParams, **changes: object) -> AddedRow:
    """A row of a fresh request with seed 1 and stop id 0, unless changed."""
    values: dict[str, object] = {
        "row": row,
        "request_id": RequestId(f"r{row}"),
        "params": params,
        "prompt_token_ids": (),
        "output_token_ids": (),
        "stop_ids": frozenset({0}),
        "seed": 1,
    }
    return AddedRow(**(values | changes))  # type: ignore[arg-type] # keyword names are the fields'


def sampler_of(
    *params: SamplingParams, vocab_size: int = 32, mode: LogprobsMode = "raw_logprobs", **changes: object
) -> Sampler:
    """A sampler whose rows 0.. hold these requests."""
    sampler = Sampler(vocab_size, max(8, len(params)), CPU, mode)
    rows = tuple(added(row, each, **changes) for row, each in enumerate(params))
    sampler.update_batch(BatchUpdate(added=rows))
    return sampler


@dataclass
class RandomCase:
    """A request with random parameters and history."""

    params: SamplingParams
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    stop_ids: frozenset[int]
    seed: int
    logits: np.ndarray[tuple[int], np.dtype[np.float32]] = field(repr=False)


def random_case(rng: np.random.Generator, vocab_size: int) -> RandomCase:
    """Any mix of parameters; every one is off in about half of the cases."""

    def maybe(value: object, off: object) -> object:
        return value if rng.random() < 0.5 else off

    def tokens(low: int, high: int) -> tuple[int, ...]:
        return tuple(int(token) for token in rng.integers(0, vocab_size, rng.integers(low, high)))

    output = tokens(0, 20)
    stops = frozenset(tokens(1, 4))
    words: list[Sequence[int]] = [tokens(1, 2), tokens(2, 4)]
    if len(output) > 2:
        words.append((*output[-2:], int(rng.integers(vocab_size))))
    biased = tuple(dict.fromkeys(tokens(1, 6)))
    params = SamplingParams(
        temperature=float(maybe(rng.uniform(0.05, 2), 1.0)),  # type: ignore[arg-type] # both are floats
        top_p=float(maybe(rng.uniform(0.05, 1), 1.0)),  # type: ignore[arg-type] # both are floats
        top_k=int(maybe(rng.integers(1, vocab_size + 5), 0)),  # type: ignore[call-overload] # both are ints
        min_p=float(maybe(rng.uniform(0, 0.3), 0.0)),  # type: ignore[arg-type] # both are floats
        repetition_penalty=float(maybe(rng.uniform(0.5, 2), 1.0)),  # type: ignore[arg-type] # both are floats
        frequency_penalty=float(maybe(rng.uniform(-2, 2), 0.0)),  # type: ignore[arg-type] # both are floats
        presence_penalty=float(maybe(rng.uniform(-2, 2), 0.0)),  # type: ignore[arg-type] # both are floats
        min_tokens=int(maybe(rng.integers(1, 25), 0)),  # type: ignore[call-overload] # both are ints
        max_tokens=100,
        logit_bias=tuple((token, float(rng.uniform(-5, 5))) for token in biased) if rng.random() < 0.5 else (),
        allowed_token_ids=tuple(sorted({*tokens(6, 40)})) if rng.random() < 0.3 else None,
        bad_words_token_ids=tuple(map(tuple, words)) if rng.random() < 0.5 else (),
        logprobs=-1,
    )
    return RandomCase(
        params=params,
        prompt=tokens(0, 20),
        output=output,
        stop_ids=stops,
        seed=int(rng.integers(-(1 << 63), 1 << 63, dtype=np.int64)),
        logits=rng.normal(0, 3, vocab_size).astype(np.float32),
    )

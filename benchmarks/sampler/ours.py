"""Our sampler under measurement."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.sampler.cases import PROMPT_TOKENS, Case, Shape, history, thinking_markers
from common.engine.sampling.batch_state import AddedRow, BatchUpdate
from common.engine.sampling.params import SamplingParams
from common.engine.sampling.processors.thinking_budget import OutputMarkers
from common.engine.sampling.random import seed_for_choice
from common.engine.sampling.sampler import Sampler
from common.ids import RequestId


class OurSampler:
    """A full batch of one case."""

    def __init__(self, case: Case, shape: Shape, logits_file: Path, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._logits = torch.from_numpy(np.load(logits_file, mmap_mode="r")[: shape.batch_size].copy())
        self._rows = tuple(range(shape.batch_size))
        is_masked = case.allowed_share > 0
        self._bitmask = torch.from_numpy(case.bitmask(shape)) if is_masked else None
        self._masked_rows = self._rows if is_masked else ()
        opens, closes = thinking_markers(shape.vocab_size)
        markers = OutputMarkers(think_start=(opens,), think_end=(closes,))
        self._sampler = Sampler(
            shape.vocab_size,
            shape.batch_size,
            torch.device("cpu"),
            markers=None if case.thinking_budget is None else markers,
        )
        added = tuple(_row(row, case, shape) for row in self._rows)
        self._sampler.update_batch(BatchUpdate(added=added))
        self.step_s()

    def step_s(self) -> float:
        """Seconds of sampling one token per row and taking it into the state."""
        logits = self._logits.clone()
        start = self._clock()
        output = self._sampler.sample(logits, self._rows, self._bitmask, self._masked_rows)
        self._sampler.record(self._rows, output.token_ids)
        return self._clock() - start


def _row(row: int, case: Case, shape: Shape) -> AddedRow:
    values: dict[str, object] = {**case.params, "max_tokens": 1 << 20}
    if case.greedy_every and row % case.greedy_every == 0:
        values["temperature"] = 0.0
    vocab_size = shape.vocab_size
    if case.num_biased:
        values["logit_bias"] = tuple((token, 1.0) for token in case.token_ids(case.num_biased, vocab_size))
    if case.num_allowed:
        values["allowed_token_ids"] = tuple(case.token_ids(case.num_allowed, vocab_size))
    if case.num_bad_words:
        words = case.token_ids(2 * case.num_bad_words, vocab_size)
        values["bad_words_token_ids"] = tuple(zip(words[::2], words[1::2], strict=True))
    if case.num_reported:
        values["logprob_token_ids"] = tuple(case.token_ids(case.num_reported, vocab_size))
    values["thinking_token_budget"] = case.thinking_budget
    tokens = history(row, PROMPT_TOKENS + shape.output_tokens, vocab_size)
    return AddedRow(
        row=row,
        request_id=RequestId(str(row)),
        params=SamplingParams(**values),  # type: ignore[arg-type] # names and types are SamplingParams' own
        prompt_token_ids=[*tokens[: PROMPT_TOKENS - 1], thinking_markers(vocab_size)[0]],
        output_token_ids=tokens[PROMPT_TOKENS:],
        stop_ids=frozenset({2}),
        seed=seed_for_choice(row if case.seeded else None),
    )

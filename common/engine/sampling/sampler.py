"""From logits to tokens of one step, over the persistent batch.

Journey row 8. Owns: the sampler the engine core drives (one thread). Does not know requests' text, KV or grammars beyond
their bitmasks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from common.engine.outputs import PositionLogprobs
from common.engine.sampling.batch_state import BatchUpdate

LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """What a step sampled.

    Attributes:
        token_ids: one per logits row; meaningless for rows in `failed_rows`.
        logprobs: one per logits row; None where the request asked for none or the row failed.
        failed_rows: logits rows whose masks left no token (or whose logits are not numbers): end them with
            `NoTokenAllowed`.
    """

    token_ids: list[int]
    logprobs: list[PositionLogprobs | None]
    failed_rows: frozenset[int]


class Sampler:
    """Samples one token per logits row.

    Args:
        vocab_size: width of the logits.
        max_rows: persistent rows, `0 <= row < max_rows`.
        device: where the logits live.
        logprobs_mode: what `logprobs` reports.
        processors: loaded custom processors, run beside the built-in ones.
    """

    def __init__(
        self,
        vocab_size: int,
        max_rows: int,
        device: torch.device,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        processors: Sequence[object] = (),
    ) -> None:
        raise NotImplementedError

    def update_batch(self, update: BatchUpdate) -> None:
        """Apply membership changes (removed, added, moved) before the step that needs them."""
        raise NotImplementedError

    def sample(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        bitmask: torch.Tensor | None = None,
        masked_rows: Sequence[int] = (),
        drafts: Sequence[Sequence[int]] = (),
    ) -> SampleOutput:
        """Sample one token per logits row. Changes `logits`, never the batch state.

        Args:
            logits: float32 [R, vocab_size]; may be overwritten.
            rows: persistent row of each logits row, length R; several may name one row (speculation).
            bitmask: int32 CPU [M, ceil(vocab_size / 32)], bit set = allowed, or None.
            masked_rows: logits row of each bitmask row, length M; all others are unconstrained.
            drafts: tokens assumed accepted before each logits row beyond the recorded ones; empty: none.
        """
        raise NotImplementedError

    def record(self, rows: Sequence[int], token_ids: Sequence[int]) -> None:
        """Tokens were accepted: `token_ids[i]` by persistent row `rows[i]`; a row may come several times, in order."""
        raise NotImplementedError

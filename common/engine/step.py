"""The frozen values of one step: what to compute (`StepPlan`), and the sampler as the core sees it (`SamplerPort`).

Journey row 8. Owns: the border between scheduler, runner and core. A plan is made without I/O and executed by others.
The values are msgspec structs: made in C, at a fifth of what a frozen dataclass costs.
Does not know: how any of them works.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec
import torch

from common.engine.kv_cache.manager import BlockCopy
from common.engine.outputs import PositionLogprobs, TokenDelta
from common.engine.ports import PullPlan
from common.engine.sampling.batch_state import BatchUpdate
from common.engine.scheduling.sequence import Request
from common.ids import RequestId


class ScheduledChunk(msgspec.Struct, frozen=True):
    """Tokens `[start, start + num_tokens)` of one request, computed in this step.

    Attributes:
        request: whose; read by the runner, changed by nobody before `apply`.
        start: position of the first token.
        num_tokens: at least 1; for a running decode 1 and its draft.
        samples: whether the chunk reaches the last known token, so a next token is sampled.
        num_prompt_logits: leading tokens of the chunk whose next-token logits give prompt log probabilities.
        draft: guesses at what follows the last known token; the chunk's last tokens. Kept as far as sampling agrees.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    num_prompt_logits: int = 0
    draft: tuple[int, ...] = ()

    @property
    def num_samples(self) -> int:
        """Logits rows that are sampled: one behind the last known token, one behind each drafted one."""
        return 1 + len(self.draft) if self.samples else 0


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What one step does, in this order: copies, cancels, abandons, pulls, then the forward over `chunks`.

    Attributes:
        chunks: what to compute; decodes first.
        left: keys that hold no place in the batch any more since the last plan (ended or preempted).
        copies: block copies of forks.
        cancelled: requests that ended while their pull was running; its outcome is still awaited.
        abandoned: requests that need nothing (more) from their peer.
        pulls: reads to start; their blocks are reserved.
        started: request ids scheduled for the first time, i.e. that left the waiting room.
        num_tokens: sum over `chunks`.
        is_decode: there are chunks, each is one token and samples, none has a draft or prompt logits: most steps.
    """

    chunks: tuple[ScheduledChunk, ...] = ()
    left: tuple[RequestId, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    cancelled: tuple[RequestId, ...] = ()
    abandoned: tuple[RequestId, ...] = ()
    pulls: tuple[PullPlan, ...] = ()
    started: tuple[RequestId, ...] = ()
    num_tokens: int = 0
    is_decode: bool = False


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one step gave.

    Attributes:
        deltas: outputs, in step order.
        started: request ids scheduled for the first time, i.e. that left the waiting room.
        did_work: False when nothing can happen before the next wake-up.
    """

    deltas: tuple[TokenDelta, ...] = ()
    started: tuple[RequestId, ...] = ()
    did_work: bool = False


class SampledTokens(Protocol):
    """What `SamplerPort.sample` returns; `common.engine.sampling.sampler.SampleOutput`."""

    @property
    def token_ids(self) -> list[int]:
        """One per logits row; meaningless for rows in `failed_rows`."""
        ...

    @property
    def logprobs(self) -> list[PositionLogprobs | None]:
        """One per logits row; None where none were asked for."""
        ...

    @property
    def failed_rows(self) -> frozenset[int]:
        """Logits rows whose masks left no token."""
        ...


class SamplerPort(Protocol):
    """The sampler, driven by the step loop alone. Implemented by `common.engine.sampling.sampler.Sampler`."""

    def update_batch(self, update: BatchUpdate) -> None:
        """Apply membership changes before the step that needs them."""
        ...

    def sample(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        bitmask: torch.Tensor | None = None,
        masked_rows: Sequence[int] = (),
        drafts: Sequence[Sequence[int]] = (),
        highest: torch.Tensor | None = None,
    ) -> SampledTokens:
        """One token per logits row of float32 `[R, vocab_size]`; `rows[i]` is the persistent row of logits row i.

        `bitmask` (int32 CPU `[M, ceil(vocab_size / 32)]`) constrains the logits rows `masked_rows`, length M. Before
        logits row i the tokens `drafts[i]` are taken as accepted beyond those recorded; empty: no row has any.
        `highest` (int64 CPU `[R]`), if given: the first token with the highest of each row of `logits`; -1: not known.
        """
        ...

    def record(self, rows: Sequence[int], token_ids: Sequence[int]) -> None:
        """`token_ids[i]` was accepted by persistent row `rows[i]`; a row may come several times, in order."""
        ...

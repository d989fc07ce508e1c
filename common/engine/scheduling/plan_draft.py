"""A step's plan while it is being made.

Owns: the lists that `freeze` turns into a `StepPlan`, and the step's limits. Does not know: policy.
"""

from common.engine.kv_cache.manager import BlockCopy
from common.engine.ports import PullPlan
from common.engine.scheduling.budget import StepBudget
from common.engine.scheduling.sequence import Request
from common.engine.step import ScheduledChunk, StepPlan
from common.ids import RequestId

MAX_PROMPT_LOGITS_PER_STEP = 256
"""Rows of `[rows, vocab_size]` that prompt log probabilities may add to one forward: 50 MB at 49,152 tokens."""


class PlanDraft:
    """Mutable for the length of one `Scheduler.plan` call."""

    __slots__ = (
        "budget",
        "chunks",
        "copies",
        "has_preempted",
        "has_released",
        "num_prompt_logits_left",
        "pulls",
        "started",
    )

    def __init__(self, max_num_batched_tokens: int) -> None:
        self.budget = StepBudget(max_num_batched_tokens)
        self.chunks: list[ScheduledChunk] = []
        self.copies: list[BlockCopy] = []
        self.pulls: list[PullPlan] = []
        self.started: list[RequestId] = []
        self.num_prompt_logits_left = MAX_PROMPT_LOGITS_PER_STEP
        self.has_preempted = False
        self.has_released = False

    def add_chunk(self, request: Request, wanted_tokens: int, drafted: tuple[int, ...] = ()) -> None:
        """Compute up to `wanted_tokens` more tokens of `request`, as far as budget and logits rows go; may add none.

        `drafted` tokens, for which the caller made sure there is budget, are checked behind the last known one.
        """
        start = request.num_computed_tokens
        if request.needs_prompt_logits:
            wanted_tokens = min(wanted_tokens, self.num_prompt_logits_left)
        num_tokens = self.budget.grant(wanted_tokens + len(drafted)) - len(drafted)
        if num_tokens <= 0:
            return
        num_prompt_logits = 0
        if request.needs_prompt_logits:
            num_prompt_logits = min(num_tokens, request.num_prompt_tokens - 1 - start)
            self.num_prompt_logits_left -= num_prompt_logits
        samples = start + num_tokens == request.num_tokens
        self.chunks.append(
            ScheduledChunk(request, start, num_tokens + len(drafted), samples, num_prompt_logits, drafted)
        )

    def freeze(self, left: list[RequestId], cancelled: list[RequestId], abandoned: list[RequestId]) -> StepPlan:
        """The finished plan."""
        return StepPlan(
            chunks=tuple(self.chunks),
            left=tuple(left),
            copies=tuple(self.copies),
            cancelled=tuple(cancelled),
            abandoned=tuple(abandoned),
            pulls=tuple(self.pulls),
            started=tuple(self.started),
            num_tokens=sum(chunk.num_tokens for chunk in self.chunks),
            is_decode=bool(self.chunks) and all(map(_is_decode, self.chunks)),
        )


def _is_decode(chunk: ScheduledChunk) -> bool:
    return chunk.num_tokens == 1 and chunk.samples and not chunk.num_prompt_logits

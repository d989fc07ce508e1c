"""Drafts in a plan: who may have one, and at whose cost never.

Journey row 8. Owns: the border to whoever drafts, and the rule that a draft takes only budget and blocks nobody needs:
no decode waits for one, no request is preempted for one. Does not know: how drafts are made.
"""

from typing import Protocol

from common.engine.kv_cache.manager import KvCacheManager
from common.engine.scheduling.budget import StepBudget
from common.engine.scheduling.queue import WaitingQueue
from common.engine.scheduling.sequence import Request


class DraftSource(Protocol):
    """Guesses tokens. Implemented by `common.engine.speculation.drafter.Drafter`."""

    @property
    def max_batch(self) -> int:
        """With more requests running than this, nobody drafts."""
        ...

    def draft(self, request: Request, limit: int) -> tuple[int, ...]:
        """Up to `limit` tokens that may follow the last token of a running decode; often none."""
        ...

    def settle(self, request: Request, num_drafted: int, num_right: int) -> None:
        """`num_right` of the `num_drafted` tokens of its last draft came."""
        ...


def spare_draft(
    source: DraftSource | None, request: Request, budget: StepBudget, running: WaitingQueue, kv: KvCacheManager
) -> tuple[int, ...]:
    """A draft for a decode that has its block; none where it would take what the other running requests may need.

    A request's first token is never drafted behind: it must come as soon as it can.
    """
    if source is None or len(running) > source.max_batch or not request.num_output_tokens:
        return ()
    tokens = source.draft(request, budget.num_tokens_left - len(running))
    if tokens and not kv.try_grow(request.holding, request.num_tokens + len(tokens), leave=len(running)):
        return ()
    return tokens

"""The plan of a step that does what the last one did: the same decodes, each one token further.

Journey row 8. Owns: when that is so, and such a plan, which is the one the scheduler would have made the long way. A
forward leaves Python's code and objects far from the processor's core, so what most steps need has to be little.
Does not know: queues but the running one.
"""

from common.engine.kv_cache.manager import KvCacheManager
from common.engine.scheduling.queue import WaitingQueue
from common.engine.scheduling.sequence import Request
from common.engine.step import ScheduledChunk, StepPlan


class SteadyDecodes:
    """Remembers the requests of a plan that let every running one decode."""

    def __init__(self) -> None:
        self._requests: list[Request] | None = None

    def remember(self, plan: StepPlan) -> None:
        """Take note of the last plan."""
        self._requests = [chunk.request for chunk in plan.chunks] if plan.is_decode else None

    def next_plan(self, running: WaitingQueue, kv: KvCacheManager) -> StepPlan | None:
        """The next plan, for the caller who knows that nobody left, may come in or be drafted for.

        Args:
            running: all running requests.
            kv: grows the requests, oldest first, as far as blocks are free.

        Returns:
            None where the step is another one; what has grown by then would have grown first in it, too.
        """
        requests = self._requests
        if requests is None or not running.is_exactly(requests):
            return None
        chunks, block_size = [], kv.block_size
        for request in requests:
            start = request.num_computed_tokens
            if len(request.token_ids) - start != 1:
                return None
            if start % block_size == 0 and not kv.try_grow(request.holding, start + 1):  # else its last block has room
                return None
            chunks.append(ScheduledChunk(request, start, 1, True))
        return StepPlan(chunks=tuple(chunks), num_tokens=len(chunks), is_decode=True)

"""Who gives way when the pool is full: the last come is preempted first and recomputed later.

Journey row 8. Owns: the choice of victims. The oldest running request is never one of them while a newer one runs, so
somebody always makes progress. Does not know: queues; the scheduler moves the victims.
"""

from collections.abc import Callable

from common.engine.kv_cache.manager import KvCacheManager
from common.engine.scheduling.queue import WaitingQueue
from common.engine.scheduling.sequence import Request


def make_room(request: Request, running: WaitingQueue, kv: KvCacheManager, preempt: Callable[[Request], None]) -> bool:
    """Grow `request` to hold all its tokens, preempting newer ones for it, itself last.

    Args:
        request: a running request that wants to compute its last known token.
        running: all running requests; `preempt` takes victims out of it.
        kv: whose blocks.
        preempt: frees a victim's blocks and puts it back into the waiting room.

    Returns:
        False when `request` itself had to give way.
    """
    while not kv.try_grow(request.holding, request.num_tokens):
        victim = running.newest() or request
        preempt(victim)
        if victim is request:
            return False
    return True

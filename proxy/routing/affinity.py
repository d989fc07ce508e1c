"""Send what belongs together to the same engine, as long as that engine is not much busier than the others.

Owns: the memory of who got what, and the balance between affinity and load. Does not know: what the keys stand for.
"""

from collections import OrderedDict
from collections.abc import Sequence

from proxy.call import Call
from proxy.fleet.worker import Worker
from proxy.routing.least_loaded import load
from proxy.routing.policy import RoutingPolicy

_MAX_KEYS = 200_000
_MAX_EXTRA_LOAD = 64 << 10
"""How much more outstanding work (bytes) than the least busy engine affinity is worth."""


class AffinityTable:
    """Key → the workers that have seen it, the least recently used keys forgotten first."""

    def __init__(self, max_keys: int = _MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._holders: OrderedDict[int, set[Worker]] = OrderedDict()

    def depth_by_worker(self, keys: Sequence[int], workers: Sequence[Worker]) -> dict[Worker, int]:
        """How many of `keys`, from the first on and without a gap, each worker has seen."""
        depths = dict.fromkeys(workers, 0)
        remaining = set(workers)
        for key in keys:
            remaining &= self._holders.get(key, set())
            if not remaining:
                break
            for worker in remaining:
                depths[worker] += 1
        return depths

    def remember(self, keys: Sequence[int], worker: Worker) -> None:
        """`worker` is going to see `keys`."""
        for key in keys:
            self._holders.setdefault(key, set()).add(worker)
            self._holders.move_to_end(key)
        while len(self._holders) > self._max_keys:
            self._holders.popitem(last=False)


def pick_by_affinity(
    table: AffinityTable, keys: Sequence[int], workers: Sequence[Worker], call: Call, otherwise: RoutingPolicy
) -> Worker:
    """The worker that has seen most of `keys` and is not overloaded; `otherwise` decides where there is none."""
    lightest = min(load(worker) for worker in workers)
    depths = table.depth_by_worker(keys, workers)
    known = [worker for worker in workers if depths[worker] and load(worker) - lightest <= _MAX_EXTRA_LOAD]
    chosen = max(known, key=lambda worker: (depths[worker], -load(worker))) if known else otherwise.pick(workers, call)
    table.remember(keys, chosen)
    return chosen

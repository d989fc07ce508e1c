"""The better of two random choices, by outstanding work.

Owns: the comparison. Source: Mitzenmacher, "The power of two choices in randomized load balancing" (2001): nearly as
good as looking at everybody, and many proxies side by side do not all run to the same idle engine.
"""

from collections.abc import Sequence
from random import Random

from proxy.call import Call
from proxy.fleet.worker import Worker

_LEG_BYTES = 512
"""What one more leg weighs beside the bytes of its body: scheduling and decoding are not free."""


class LeastLoaded:
    """Power of two choices.

    Args:
        random: source of the two choices.
    """

    def __init__(self, random: Random) -> None:
        self._random = random

    def pick(self, workers: Sequence[Worker], call: Call) -> Worker:  # noqa: ARG002 - the port's signature
        """The less loaded of two."""
        if len(workers) == 1:
            return workers[0]
        first, second = self._random.sample(workers, 2)
        return min(first, second, key=load)


def load(worker: Worker) -> int:
    """Outstanding work, in bytes of request bodies."""
    return worker.outstanding_bytes + _LEG_BYTES * worker.num_legs

"""Take turns.

Owns: whose turn it is. Does not know: load.
"""

from collections.abc import Sequence

from proxy.call import Call
from proxy.fleet.worker import Worker


class RoundRobin:
    """Every worker in turn, whatever comes and goes between two picks."""

    def __init__(self) -> None:
        self._num_picks = 0

    def pick(self, workers: Sequence[Worker], call: Call) -> Worker:  # noqa: ARG002 - the port's signature
        """The next one."""
        self._num_picks += 1
        return workers[self._num_picks % len(workers)]

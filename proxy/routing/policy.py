"""What a routing policy is: a synchronous choice among workers that may be chosen.

Owns: the protocol and the table of names. Does not know: health (only routable workers are offered), HTTP.
"""

from collections.abc import Sequence
from typing import Protocol

from proxy.call import Call
from proxy.fleet.worker import Worker


class RoutingPolicy(Protocol):
    """Chooses one worker per leg."""

    def pick(self, workers: Sequence[Worker], call: Call) -> Worker:
        """One of `workers` (at least one is offered) for `call`."""
        ...

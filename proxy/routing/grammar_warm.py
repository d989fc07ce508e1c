"""A constraint goes to the engine that has compiled it before; free text goes anywhere.

Owns: the key of a constraint as the client spelled it. Does not know: grammars.
"""

from collections.abc import Sequence

from proxy.call import Call
from proxy.fleet.worker import Worker
from proxy.leg_bodies import prepare_body
from proxy.routing.affinity import AffinityTable, pick_by_affinity
from proxy.routing.policy import RoutingPolicy


class GrammarWarm:
    """By the constraint's spelling.

    Args:
        otherwise: decides about free text and constraints nobody has seen.
    """

    def __init__(self, otherwise: RoutingPolicy) -> None:
        self._table = AffinityTable()
        self._otherwise = otherwise

    def pick(self, workers: Sequence[Worker], call: Call) -> Worker:
        """The worker that has the grammar, if any."""
        if not call.is_constrained:
            return self._otherwise.pick(workers, call)
        return pick_by_affinity(self._table, [hash(prepare_body(call.fields))], workers, call, self._otherwise)

"""Which beginnings of prompts each D has served, and so most likely still has in its prefix cache.

Owns: the estimate of how much of a prompt a D would have to compute itself. Does not know: what D really kept.
"""

from proxy.call import Call
from proxy.fleet.worker import Worker
from proxy.routing.affinity import AffinityTable
from proxy.routing.prefix_affinity import BLOCK_BYTES, block_keys, prompt_bytes


class PromptMemory:
    """Remembers prompts by their blocks."""

    def __init__(self) -> None:
        self._table = AffinityTable()

    def uncached_bytes(self, worker: Worker, call: Call) -> int:
        """Bytes of the call's prompt that `worker` has not served before, as far as is known."""
        depth = self._table.depth_by_worker(block_keys(call), [worker])[worker]
        return max(0, len(prompt_bytes(call)) - depth * BLOCK_BYTES)

    def remember(self, worker: Worker, call: Call) -> None:
        """`worker` has served the call."""
        self._table.remember(block_keys(call), worker)

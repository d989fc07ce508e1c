"""Prompts that begin alike go to the engine whose prefix cache holds that beginning.

Owns: cutting a prompt's raw JSON into blocks whose keys depend on all blocks before them. Does not know: tokens.
"""

from collections.abc import Sequence

from proxy.call import Call
from proxy.fleet.worker import Worker
from proxy.routing.affinity import AffinityTable, pick_by_affinity
from proxy.routing.policy import RoutingPolicy

BLOCK_BYTES = 256
_MAX_BLOCKS = 512


class PrefixAffinity:
    """By the longest known beginning.

    Args:
        otherwise: decides about prompts nobody has seen.
    """

    def __init__(self, otherwise: RoutingPolicy) -> None:
        self._table = AffinityTable()
        self._otherwise = otherwise

    def pick(self, workers: Sequence[Worker], call: Call) -> Worker:
        """The worker most likely to have the prompt's beginning in its cache."""
        return pick_by_affinity(self._table, block_keys(call), workers, call, self._otherwise)


def block_keys(call: Call) -> list[int]:
    """One key per full block of the prompt as the client spelled it; equal keys mean equal beginnings."""
    raw = prompt_bytes(call)
    keys: list[int] = []
    key = hash((call.model, bytes(call.fields.get("tools", b""))))
    for start in range(0, min(len(raw), BLOCK_BYTES * _MAX_BLOCKS) - BLOCK_BYTES + 1, BLOCK_BYTES):
        key = hash((key, raw[start : start + BLOCK_BYTES]))
        keys.append(key)
    return keys


def prompt_bytes(call: Call) -> bytes:
    """The prompt as the client spelled it."""
    return bytes(call.fields.get("messages") or call.fields.get("prompt") or b"")

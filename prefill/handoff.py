"""P's handoff: finished blocks go under a lease, and the reference to them into the answer (journey row 4).

Owns: the engine's port onto `kv_transfer.producer`. The engine keeps its own reference to each block until the lease
comes back by `poll_released`.
Does not know: how blocks are read or leases end.
"""

from collections.abc import Sequence

from common.errors import Bug
from common.ids import BlockId, LeaseId, RequestId
from common.wire.kv_params import KvReference
from kv_transfer.producer import KVProducer


class Handoff:
    """Implements `common.engine.ports.KVSink`.

    Args:
        producer: leases and references.
        block_size: tokens per block of P's pool.
    """

    def __init__(self, producer: KVProducer, block_size: int) -> None:
        self._producer = producer
        self._block_size = block_size

    def hand_off(
        self, request_id: RequestId, block_ids: Sequence[BlockId], prompt_token_ids: Sequence[int]
    ) -> KvReference:
        """Pin the blocks that hold the prompt under a new lease.

        Blocks beyond the prompt (room for the sampled token) are not referred to.

        Args:
            request_id: whose prompt.
            block_ids: its block table, at least `ceil(len(prompt) / block_size)` long.
            prompt_token_ids: every token of the prompt; its KV is in the blocks.

        Raises:
            QueueFull: more leases are held than configured.
        """
        num_blocks = -(-len(prompt_token_ids) // self._block_size)
        if num_blocks == 0 or len(block_ids) < num_blocks:
            raise Bug(f"{len(block_ids)} blocks cannot hold a prompt of {len(prompt_token_ids)} tokens")
        return self._producer.hold(request_id, block_ids[:num_blocks], prompt_token_ids)

    def give_up(self, request_id: RequestId) -> None:
        """End the leases of a request whose reference nobody got."""
        self._producer.cancel_request(request_id)

    def poll_released(self) -> Sequence[LeaseId]:
        """Leases that ended since the last call, each exactly once."""
        return self._producer.poll_released()

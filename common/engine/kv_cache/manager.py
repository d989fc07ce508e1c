"""Blocks of requests: reuse, growth, forks, pins; one place through which every reference is taken and given back.

Journey rows 4, 6, 8. Owns: pool, prefix cache and the table of each sequence. Synchronous, no I/O.
Does not know: tensors, scheduling policy. Idea of the split pool / cache / manager: vLLM 0.32 `v1/core/`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.engine.kv_cache.block_pool import BlockPool
from common.engine.kv_cache.block_table import BlockTable, num_blocks_for
from common.engine.kv_cache.hashing import BlockHash, extend_hashes
from common.engine.kv_cache.prefix_cache import PrefixCache
from common.errors import Bug
from common.ids import BlockId, LeaseId, RequestId


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the whole of block `source` into block `target`."""

    source: BlockId
    target: BlockId


class Holding:
    """One sequence's blocks and the names of its full ones. Made by the manager, kept by the request.

    Attributes:
        key: whose it is.
        table: its blocks; empty while it holds nothing.
        hashes: names of full blocks of its tokens, as far as they were needed.
        num_entered: leading blocks already known to the prefix cache.
    """

    __slots__ = ("hashes", "key", "num_entered", "table")

    def __init__(self, key: RequestId) -> None:
        self.key = key
        self.table = BlockTable()
        self.hashes: list[BlockHash] = []
        self.num_entered = 0


class KvCacheManager:
    """Everything about blocks that is not bytes.

    Args:
        num_blocks: size of the pool.
        block_size: tokens per block.
        enable_prefix_cache: whether equal prefixes share blocks.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_cache: bool = True) -> None:
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._cache = PrefixCache()
        self._enable_prefix_cache = enable_prefix_cache
        self._holdings: set[Holding] = set()
        self._pinned: dict[LeaseId, list[BlockId]] = {}

    @property
    def num_blocks(self) -> int:
        """Size of the pool."""
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now (unreferenced content counts as free)."""
        return self._pool.num_free

    @property
    def num_in_use(self) -> int:
        """Blocks referenced by requests or leases."""
        return self._pool.num_in_use

    @property
    def num_pinned_leases(self) -> int:
        """Handoffs whose blocks are still pinned."""
        return len(self._pinned)

    def find_prefix(self, holding: Holding, token_ids: Sequence[int]) -> list[BlockId]:
        """Cached blocks of the longest known prefix that leaves at least one token to compute.

        Changes nothing but `holding.hashes`. The blocks are not held until `admit` takes them.
        """
        if not self._enable_prefix_cache:
            return []
        num_usable = len(token_ids) - 1
        extend_hashes(holding.hashes, token_ids, self.block_size, num_usable)
        return self._cache.longest_match(holding.hashes[: num_usable // self.block_size])

    def num_blocks_to_admit(self, num_tokens: int, prefix: Sequence[BlockId]) -> int:
        """How much `num_free` shrinks when a sequence of `num_tokens` enters on top of the cached `prefix`."""
        revived = sum(self._pool.is_free(block_id) for block_id in prefix)
        return num_blocks_for(num_tokens, self.block_size) - len(prefix) + revived

    def admit(self, holding: Holding, num_tokens: int, prefix: Sequence[BlockId]) -> None:
        """Hold `prefix` and fresh blocks for `num_tokens` tokens; the caller made sure that they are free.

        Raises:
            Bug: the sequence already holds blocks, or there are too few.
        """
        if len(holding.table):
            raise Bug(f"{holding.key} is admitted while it holds blocks")
        for block_id in prefix:
            self._pool.hold(block_id)
        holding.table.extend(prefix)
        holding.num_entered = len(prefix)
        self._holdings.add(holding)
        self._grow(holding, num_tokens)

    def try_grow(self, holding: Holding, num_tokens: int, *, leave: int = 0) -> bool:
        """Make room for `num_tokens` tokens in all; False, and nothing changed, when too few blocks are free.

        Blocks beyond those it has are taken only where `leave` free ones remain.
        """
        if num_tokens <= len(holding.table) * self.block_size:  # most decodes
            return True
        if num_blocks_for(num_tokens, self.block_size) - len(holding.table) + leave > self._pool.num_free:
            return False
        self._grow(holding, num_tokens)
        return True

    def num_blocks_to_fork(self, num_shared_tokens: int, num_tokens: int) -> int:
        """Fresh blocks a fork takes: all but the full ones it shares."""
        return num_blocks_for(num_tokens, self.block_size) - num_shared_tokens // self.block_size

    def fork(self, donor: Holding, holding: Holding, num_shared_tokens: int, num_tokens: int) -> BlockCopy | None:
        """Start `holding` with the first `num_shared_tokens` tokens of `donor`, and room for `num_tokens`.

        Full blocks are shared by reference; a partial last one must be copied before anything is written.

        Returns:
            The copy to make before the next forward, or None when the shared tokens end at a block border.
        """
        num_full = num_shared_tokens // self.block_size
        self.admit(holding, num_tokens, donor.table.slice(0, num_full))
        if num_shared_tokens % self.block_size == 0:
            return None
        return BlockCopy(donor.table[num_full], holding.table[num_full])

    def enter_computed(self, holding: Holding, token_ids: Sequence[int], num_computed: int) -> None:
        """The first `num_computed` tokens really have their KV here: make their full blocks findable."""
        num_full = num_computed // self.block_size
        if not self._enable_prefix_cache or num_full <= holding.num_entered:
            return
        extend_hashes(holding.hashes, token_ids, self.block_size, num_computed)
        for index in range(holding.num_entered, num_full):
            self._cache.enter(holding.hashes[index], holding.table[index])
        holding.num_entered = num_full

    def free(self, holding: Holding) -> None:
        """Give back every block of the sequence; the last token's block is reused first. Idempotent."""
        self._holdings.discard(holding)
        self._release(holding.table.clear())
        holding.num_entered = 0

    def pin(self, lease_id: LeaseId, block_ids: Sequence[BlockId]) -> None:
        """Hold the blocks for a lease as well, until `unpin`.

        Raises:
            Bug: the lease already has blocks.
        """
        if lease_id in self._pinned:
            raise Bug(f"lease {lease_id} pins blocks twice")
        for block_id in block_ids:
            self._pool.hold(block_id)
        self._pinned[lease_id] = list(block_ids)

    def unpin(self, lease_id: LeaseId) -> bool:
        """The lease ended; False when it had no blocks (any more)."""
        block_ids = self._pinned.pop(lease_id, None)
        if block_ids is None:
            return False
        self._release(block_ids)
        return True

    def clear_prefix_cache(self) -> None:
        """Forget all reusable content; blocks in use stay in use."""
        self._cache.clear()

    def check_integrity(self) -> None:
        """Prove that every reference belongs to a request or a lease.

        Raises:
            Bug: a block leaked or was given back twice, or the prefix cache contradicts itself.
        """
        held = [block_id for holding in self._holdings for block_id in holding.table.slice(0)]
        held += [block_id for block_ids in self._pinned.values() for block_id in block_ids]
        self._pool.check_integrity(held)
        self._cache.check_integrity()

    def _grow(self, holding: Holding, num_tokens: int) -> None:
        fresh = self._pool.take(max(0, num_blocks_for(num_tokens, self.block_size) - len(holding.table)))
        for block_id in fresh:
            self._cache.forget(block_id)
        holding.table.extend(fresh)

    def _release(self, block_ids: list[BlockId]) -> None:
        for block_id in reversed(block_ids):
            self._pool.release(block_id, keep_content=block_id in self._cache)

"""Which block holds which content, so that equal prefixes are computed or pulled once.

Journey rows 6, 8. Owns: the two-way map between content names and blocks. When a block is thrown away is the pool's
decision; it says so through `forget`. Does not know: reference counts, requests.
"""

from collections.abc import Sequence

from common.engine.kv_cache.hashing import BlockHash
from common.errors import Bug
from common.ids import BlockId


class PrefixCache:
    """Content name -> block. Only blocks whose tokens are all computed or pulled may be entered."""

    def __init__(self) -> None:
        self._block_of: dict[BlockHash, BlockId] = {}
        self._hash_of: dict[BlockId, BlockHash] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, block_id: BlockId) -> bool:
        return block_id in self._hash_of

    def longest_match(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """Blocks of the longest known prefix of `hashes`, in order. Changes nothing."""
        found: list[BlockId] = []
        for block_hash in hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def enter(self, block_hash: BlockHash, block_id: BlockId) -> None:
        """Remember that `block_id` holds `block_hash`; the first holder of a content stays the one that is found."""
        if block_hash not in self._block_of and block_id not in self._hash_of:
            self._block_of[block_hash] = block_id
            self._hash_of[block_id] = block_hash

    def forget(self, block_id: BlockId) -> None:
        """The block is about to be overwritten. Idempotent."""
        block_hash = self._hash_of.pop(block_id, None)
        if block_hash is not None:
            del self._block_of[block_hash]

    def clear(self) -> None:
        """Forget everything."""
        self._block_of.clear()
        self._hash_of.clear()

    def check_integrity(self) -> None:
        """Raise `Bug` unless both directions of the map agree."""
        if {b: h for h, b in self._block_of.items()} != self._hash_of:
            raise Bug("prefix cache: names and blocks disagree")

"""The pool of KV blocks: who holds how many references to which, and which block is reused next.

Journey rows 4, 6, 8. Owns: reference counts and the order in which free blocks are taken.
Does not know: what a block holds, requests, tensors.
"""

from collections import OrderedDict
from collections.abc import Sequence

from common.errors import Bug
from common.ids import BlockId


class BlockPool:
    """`num_blocks` blocks, each free (no references) or in use. Not thread-safe: the step loop owns it.

    Free blocks form one queue. Those with nothing worth keeping stand at its front, those whose content may be found
    again at its back, oldest first, so that content is thrown away only when nothing else is left:

        taken next -> | blank | blank | oldest content | ... | newest content |
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free: OrderedDict[BlockId, None] = OrderedDict((BlockId(i), None) for i in range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks without references, whether their content is worth something or not."""
        return len(self._free)

    @property
    def num_in_use(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - len(self._free)

    def references(self, block_id: BlockId) -> int:
        """How many holders `block_id` has."""
        return self._references[block_id]

    def is_free(self, block_id: BlockId) -> bool:
        """Whether nobody holds `block_id`."""
        return self._references[block_id] == 0

    def take(self, count: int) -> list[BlockId]:
        """Take `count` free blocks, one reference each; their old content is gone for the caller to forget.

        Raises:
            Bug: fewer are free; callers ask `num_free` first.
        """
        if count > len(self._free):
            raise Bug(f"asked for {count} blocks, {len(self._free)} are free")
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in taken:
            self._references[block_id] = 1
        return taken

    def hold(self, block_id: BlockId) -> None:
        """Add a reference; a free block leaves the queue with its content."""
        if self._references[block_id] == 0:
            del self._free[block_id]
        self._references[block_id] += 1

    def release(self, block_id: BlockId, *, keep_content: bool) -> None:
        """Give one reference back; the last one makes the block free.

        Args:
            block_id: the block.
            keep_content: whether its content may be found again, i.e. it is reused as late as possible.

        Raises:
            Bug: nobody held it.
        """
        if self._references[block_id] == 0:
            raise Bug(f"block {block_id} was released more often than held")
        self._references[block_id] -= 1
        if self._references[block_id] == 0:
            self._free[block_id] = None
            if not keep_content:
                self._free.move_to_end(block_id, last=False)

    def check_integrity(self, held: Sequence[BlockId]) -> None:
        """Prove conservation: `held` lists every reference there should be, one entry each.

        Raises:
            Bug: a count differs, or the queue disagrees with the counts.
        """
        expected = [0] * self.num_blocks
        for block_id in held:
            expected[block_id] += 1
        for index, (counted, wanted) in enumerate(zip(self._references, expected, strict=True)):
            if counted != wanted:
                raise Bug(f"block {index} has {counted} references, its holders account for {wanted}")
            if (counted == 0) != (BlockId(index) in self._free):
                raise Bug(f"block {index} with {counted} references is on the wrong side of the free queue")

"""One sequence's blocks in order.

Owns: the list and the arithmetic token -> block. It only grows until it is emptied, so copies of it (the runner's) can
follow by looking at the new tail. Does not know: who else holds the blocks.
"""

from collections.abc import Sequence

from common.ids import BlockId


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


class BlockTable:
    """Block `i` holds the tokens `[i * block_size, (i + 1) * block_size)` of its sequence."""

    __slots__ = ("_ids",)

    def __init__(self) -> None:
        self._ids: list[BlockId] = []

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> BlockId:
        return self._ids[index]

    def slice(self, start: int, end: int | None = None) -> list[BlockId]:
        """Blocks `[start, end)` as a new list."""
        return self._ids[start:end]

    def extend(self, block_ids: Sequence[BlockId]) -> None:
        """Append blocks."""
        self._ids.extend(block_ids)

    def clear(self) -> list[BlockId]:
        """Empty the table and return what it held."""
        held, self._ids = self._ids, []
        return held

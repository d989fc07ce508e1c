"""Names for block contents: a chain hash over full blocks of tokens.

Owns: the function (parent, tokens) -> name, equal in every process and on every machine.
Does not know: which block holds the content.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
"""256 bits: two prompts of different users never share one by accident or by design."""

ROOT = BlockHash(b"")
"""Parent of a sequence's first block."""


def hash_block(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Name of a full block, given the name of the block before it.

    Keys and values depend on every earlier token, so the name covers them all by way of `parent`.

    Args:
        parent: name of the previous block, `ROOT` for the first.
        token_ids: the block's tokens, all of them.

    Source: chained block hashes of vLLM 0.32 `v1/core/kv_cache_utils.py`; blake2b over fixed-width little-endian ids
    instead of a pickled tuple.
    """
    digest = blake2b(parent, digest_size=32)
    digest.update(struct.pack(f"<{len(token_ids)}I", *token_ids))
    return BlockHash(digest.digest())


def extend_hashes(hashes: list[BlockHash], token_ids: Sequence[int], block_size: int, num_tokens: int) -> None:
    """Append to `hashes` (changed in place) until it names every full block of `token_ids[:num_tokens]`.

    A sequence only grows, so each block is hashed once in its life.
    """
    for index in range(len(hashes), num_tokens // block_size):
        parent = hashes[-1] if hashes else ROOT
        hashes.append(hash_block(parent, token_ids[index * block_size : (index + 1) * block_size]))

"""Identifiers as distinct types, so that a block id never passes for a token id.

Owns: the NewTypes every room uses. Knows nothing else.
"""

from typing import NewType

RequestId = NewType("RequestId", str)
"""Unique inside one engine process; a client's id is only a label beside it."""

EngineId = NewType("EngineId", str)
"""One engine process; a restart is a new engine id."""

BlockId = NewType("BlockId", int)
"""Index of a KV block in one engine's pool, `0 <= id < num_blocks`."""

TokenId = NewType("TokenId", int)

LeaseId = NewType("LeaseId", str)
"""One hold of P's blocks for one handoff; never reused."""

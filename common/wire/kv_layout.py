"""How one engine's KV cache lies in memory: all that a reader needs to turn block ids into addresses.

One block is one contiguous region `[num_layers, 2, block_size, num_kv_heads, head_dim]` (K then V per layer):

    block 0                              block 1
    | L0 K | L0 V | L1 K | L1 V | ... |  | L0 K | ...
    ^ base_address                       ^ base_address + block_bytes
"""

import msgspec


class KvLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shape and place of a block-major KV cache. Sizes in bytes where named so."""

    base_address: int
    num_blocks: int
    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    element_bytes: int
    device: str
    device_index: int = 0

    @property
    def token_bytes(self) -> int:
        """K or V of one token in one layer."""
        return self.num_kv_heads * self.head_dim * self.element_bytes

    @property
    def block_bytes(self) -> int:
        """One whole block: every layer, K and V."""
        return self.num_layers * 2 * self.block_size * self.token_bytes

    @property
    def total_bytes(self) -> int:
        """The whole pool."""
        return self.num_blocks * self.block_bytes

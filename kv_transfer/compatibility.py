"""What two engines must agree on before one may decode on the other's KV.

Owns: the fingerprint, its version, and the sentence that names what differs; what cannot be moved is refused by name.
Journey row 7, before anything is read.
Does not know: how it travels (handshake), block sizes (they may differ: byte ranges are read, not block numbers).
"""

import msgspec

from common.errors import ConfigError
from common.wire.kv_layout import KvLayout
from common.wire.model_identity import ModelIdentity

PROTOCOL_VERSION = 1
"""History: 1 = guard table read before and after the blocks; msgpack notifications; two-phase HTTP handshake."""

LAYOUT_VERSION = 1
"""History: 1 = block-major `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`."""


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that changes the meaning of a KV byte or of a prompt token.

    Attributes:
        model: identity of the weights (name plus hash, chosen by the loader).
        dtype: of the cached K and V.
        num_layers: layers in the cache, draft layers included.
        num_kv_heads: per layer.
        head_dim: of K and V.
        tokenizer: hash of vocabulary and merges.
        chat_template: hash of the template text; empty when the model has none.
        grammar: the grammar settings that both sides must share (backend, whitespace rules, reasoning).
        layout_version: order of the axes inside a block.
        protocol_version: of handshake, guard table and notifications.
    """

    model: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    tokenizer: str
    chat_template: str = ""
    grammar: str = ""
    layout_version: int = LAYOUT_VERSION
    protocol_version: int = PROTOCOL_VERSION

    @classmethod
    def of(cls, layout: KvLayout, identity: ModelIdentity) -> "Fingerprint":
        """The fingerprint of an engine with this cache and this model; P and D make theirs alike."""
        return cls(
            model=identity.weights,
            dtype=layout.dtype,
            num_layers=layout.num_layers,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            tokenizer=identity.tokenizer,
            chat_template=identity.chat_template,
            grammar=identity.grammar,
        )


def differences(ours: Fingerprint, theirs: Fingerprint) -> tuple[str, ...]:
    """One phrase per setting that differs, such as `dtype (ours 'float32', theirs 'bfloat16')`; empty when alike."""
    phrases = []
    for name in Fingerprint.__struct_fields__:
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other:
            phrases.append(f"{name} (ours {mine!r}, theirs {other!r})")
    return tuple(phrases)


def check_buffer_device(path: str, role: str, buffer_device: str, engine_device: str) -> None:
    """Refuse a buffer that is not there: KV is read where it lies, without a copy through host memory.

    Raises:
        ConfigError: `kv_buffer_device: cpu` for an engine whose pool is not in host memory.
    """
    if buffer_device == "cpu" and engine_device != "cpu":
        raise ConfigError(
            f"{path}: key `{role}.kv_buffer_device`: there is no buffer in host memory for KV on {engine_device}; "
            "allowed here: device (NIXL reads and writes VRAM itself, by UCX's cuda_ipc and cuda_copy)"
        )

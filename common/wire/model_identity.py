"""What one engine loaded, as hashes: two engines whose identities are equal mean the same by a token and by a KV byte.

Owns: the value. Where it is compared: `kv_transfer.compatibility`.
"""

import msgspec


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Hashes of the weights, the tokenizer, the chat template, and the grammar rules in words."""

    weights: str
    tokenizer: str
    chat_template: str
    grammar: str

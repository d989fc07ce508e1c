"""The vocabulary as grammar libraries want it: bytes per token id, padded to the width of the logits.

Owns: the frozen table made once from a `Tokenizer`. Does not know any grammar library.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from common.engine.tokenizer import Tokenizer
from common.errors import StartupError

UInt32Array = npt.NDArray[np.uint32]
Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Token table.

    Attributes:
        token_bytes: `[size]`; for special tokens their name, for ids without a token `b""`.
        special_token_ids: ids whose bytes are a name, not text.
        end_token_id: the canonical end token that stands for every stop id towards the libraries.
        description: text of a `tokenizer.json` that behaves alike, where there is one.
        encode: canonical token ids of a text, without any special tokens around it.
    """

    token_bytes: tuple[bytes, ...]
    special_token_ids: frozenset[int]
    end_token_id: int
    description: str | None
    encode: Callable[[str], list[int]]

    @property
    def size(self) -> int:
        """Number of ids a mask row covers."""
        return len(self.token_bytes)

    @property
    def num_words(self) -> int:
        """32-bit words of a mask row."""
        return (self.size + 31) // 32

    def word_mask(self, token_ids: Iterable[int]) -> UInt32Array:
        """Bits of `token_ids` as a mask row, uint32 `[num_words]`; ids outside the vocabulary are left out."""
        mask = np.zeros(self.num_words, dtype=np.uint32)
        for token_id in token_ids:
            if 0 <= token_id < self.size:
                mask[token_id // 32] |= np.uint32(1 << (token_id % 32))
        return mask


def read_vocabulary(tokenizer: Tokenizer, logits_width: int | None = None) -> Vocabulary:
    """The table of `tokenizer`, padded with ids without text up to `logits_width`.

    Raises:
        StartupError: the tokenizer has no EOS: no grammar could ever end.
    """
    if not tokenizer.eos_token_ids:
        raise StartupError("the tokenizer has no EOS token, so structured output could never end")
    names = {token_id: piece.encode() for piece, token_id in tokenizer.vocab().items()}
    special = tokenizer.special_token_ids | tokenizer.eos_token_ids
    table = [
        names.get(token_id, b"") if token_id in special else tokenizer.token_bytes(token_id)
        for token_id in range(tokenizer.vocab_size)
    ]
    table.extend([b""] * (max(logits_width or 0, len(table)) - len(table)))
    return Vocabulary(
        token_bytes=tuple(table),
        special_token_ids=special,
        end_token_id=min(tokenizer.eos_token_ids),
        description=tokenizer.hf_tokenizer_json,
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )

"""Text to token ids and back: the `Tokenizer` port and its one implementation over the `tokenizers` package.

Owns: encoding, decoding, the raw bytes of a token, the fingerprint P and D compare. Reading it from files:
`common.engine.model.loader`. Does not know requests; incremental decoding is the detokenizer's.
"""

import hashlib
import json
from collections.abc import Sequence
from functools import cache
from typing import Protocol

import tokenizers

from common.errors import InvalidRequest


class Tokenizer(Protocol):
    """One vocabulary. Immutable and safe to use from several threads."""

    @property
    def vocab_size(self) -> int:
        """Number of ids with a token: ids are in `[0, vocab_size)`. A model's logits may be wider (padding)."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end an output, all of the model's generation config, not only the main one."""
        ...

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Control tokens: never text of an answer unless asked for."""
        ...

    @property
    def fingerprint(self) -> str:
        """Equal for equal vocabularies and rules; 16 hex digits."""
        ...

    @property
    def hf_tokenizer_json(self) -> str | None:
        """The text of a `tokenizer.json` that behaves like this one, for the grammar libraries; None: there is none."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens written in the text become their ids.

        Args:
            text: any text.
            add_special_tokens: add what the tokenizer puts around a prompt (BOS where the model wants one).
        """
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD. Ids without a token are skipped."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes the token stands for; `b""` for special tokens and ids without a token."""
        ...

    def vocab(self) -> dict[str, int]:
        """Token pieces as the vocabulary spells them (byte-level alphabet) to ids, special tokens included."""
        ...


@cache
def byte_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in a byte-level vocabulary, to the byte.

    Source: GPT-2 byte-level BPE (Radford et al. 2019): printable Latin-1 stands for itself, the other bytes for the
    code points from 256 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


def piece_bytes(piece: str, *, byte_level: bool) -> bytes:
    """Raw bytes of a vocabulary piece: byte-level alphabet, or sentencepiece's spelling (`▁`, `<0xAB>`)."""
    if byte_level:
        alphabet = byte_alphabet()
        if all(character in alphabet for character in piece):
            return bytes(alphabet[character] for character in piece)
        return piece.encode()
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("\u2581", " ").encode()


def _decodes_byte_level(description: object) -> bool:
    """Whether a tokenizer.json's decoder (possibly a sequence of them) is byte-level."""
    if not isinstance(description, dict):
        return False
    if description.get("type") == "ByteLevel":
        return True
    return any(_decodes_byte_level(part) for part in description.get("decoders", ()))


class HfTokenizer:
    """A tokenizer described by the text of a Hugging Face `tokenizer.json`.

    Args:
        tokenizer_json: the file's text.
        eos_token_ids: ids that end an output.
    """

    def __init__(self, tokenizer_json: str, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._json = tokenizer_json
        self._eos_token_ids = eos_token_ids
        description = json.loads(tokenizer_json)
        added = {int(token["id"]): token for token in description.get("added_tokens", ())}
        self._special_token_ids = frozenset(token_id for token_id, token in added.items() if token["special"])
        byte_level = _decodes_byte_level(description.get("decoder"))
        self._token_bytes: dict[int, bytes] = {
            token_id: piece_bytes(piece, byte_level=byte_level)
            for piece, token_id in self._tokenizer.get_vocab(with_added_tokens=False).items()
        }
        for token_id, token in added.items():
            self._token_bytes[token_id] = b"" if token["special"] else str(token["content"]).encode()
        self._vocab_size = max(self._token_bytes) + 1
        canonical = json.dumps([description, sorted(eos_token_ids)], sort_keys=True)
        self._fingerprint = hashlib.sha256(canonical.encode()).hexdigest()[:16]

    @property
    def vocab_size(self) -> int:
        """Highest id plus one."""
        return self._vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end an output."""
        return self._eos_token_ids

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Added tokens marked special."""
        return self._special_token_ids

    @property
    def fingerprint(self) -> str:
        """Hash of the whole description and the EOS ids."""
        return self._fingerprint

    @property
    def hf_tokenizer_json(self) -> str:
        """The text this was made from."""
        return self._json

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written in it become their ids.

        Raises:
            InvalidRequest: half a surrogate pair, which no text has.
        """
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError as error:
            raise InvalidRequest("the text is not valid Unicode") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; incomplete UTF-8 becomes U+FFFD, ids without a token are skipped."""
        known = [token_id for token_id in ids if 0 <= token_id < self._vocab_size]
        return str(self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """Raw bytes of the token; `b""` for special tokens and ids without a token."""
        return self._token_bytes.get(token_id, b"")

    def vocab(self) -> dict[str, int]:
        """Pieces to ids, added tokens included."""
        return dict(self._tokenizer.get_vocab(with_added_tokens=True))

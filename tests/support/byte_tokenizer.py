"""A tokenizer whose tokens are the 256 bytes and a few special tokens: no files, ids a reader can compute."""

import re
from collections.abc import Sequence

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from common.engine.tokenizer import byte_alphabet

SPECIAL_TOKENS = {"<|end|>": 256, "<|start|>": 257, "<|pad|>": 258, "<think>": 259, "</think>": 260}
EOS_TOKEN_ID = 256
_SPECIAL_PATTERN = re.compile("(" + "|".join(re.escape(text) for text in SPECIAL_TOKENS) + ")")


def byte_tokenizer_json() -> str:
    """A `tokenizer.json` equal to `ByteTokenizer`: byte-level BPE without merges."""
    vocab = dict(byte_alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    return str(tokenizer.to_str())


class ByteTokenizer:
    """Token id = byte; ids 256.. are special (`SPECIAL_TOKENS`). Implements `common.engine.tokenizer.Tokenizer`."""

    def __init__(self, eos_token_ids: frozenset[int] = frozenset({EOS_TOKEN_ID})) -> None:
        self.vocab_size = 256 + len(SPECIAL_TOKENS)
        self.eos_token_ids = eos_token_ids
        self.special_token_ids = frozenset(SPECIAL_TOKENS.values())
        self.fingerprint = f"byte-tokenizer-{'-'.join(map(str, sorted(eos_token_ids)))}"
        self.hf_tokenizer_json: str | None = byte_tokenizer_json()
        self._special_text = {token_id: text for text, token_id in SPECIAL_TOKENS.items()}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        for part in _SPECIAL_PATTERN.split(text):
            ids.extend([SPECIAL_TOKENS[part]] if part in SPECIAL_TOKENS else part.encode())
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        data = bytearray()
        for token_id in ids:
            if token_id in self._special_text and not skip_special_tokens:
                data += self._special_text[token_id].encode()
            data += self.token_bytes(token_id)
        return data.decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if 0 <= token_id < 256 else b""

    def vocab(self) -> dict[str, int]:
        return {**byte_alphabet(), **SPECIAL_TOKENS}

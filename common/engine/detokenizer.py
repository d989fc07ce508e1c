"""Token ids to text, a few at a time.

Journey row 9. Owns: characters whose bytes arrive in several tokens, and which special tokens are text. Concatenated
deltas and the flush are the text of the whole output. The text continues the prompt, so a first token that starts with
a space keeps it. Does not know stop strings: `common.engine.stop_strings`.
"""

import codecs
from collections.abc import Sequence

from common.engine.tokenizer import Tokenizer


class Detokenizer:
    """Incremental decoder of one output; work per token does not grow with the output.

    Tokens are joined as bytes, so nothing is ever put between special tokens: `spaces_between_special_tokens` has
    nothing to remove.

    Args:
        tokenizer: the model's.
        skip_special_tokens: leave control tokens out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._special_token_ids = tokenizer.special_token_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """New complete characters; bytes of an unfinished one wait for the next token."""
        return self._decoder.decode(b"".join(map(self._bytes, token_ids)))

    def flush(self) -> str:
        """What is still waiting, as U+FFFD; the output has ended."""
        return self._decoder.decode(b"", final=True)

    def _bytes(self, token_id: int) -> bytes:
        if token_id not in self._special_token_ids:
            return self._tokenizer.token_bytes(token_id)
        if self._skip_special_tokens:
            return b""
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()

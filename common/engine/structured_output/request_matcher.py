"""The request-level matcher: a backend matcher plus the request's stop tokens.

Owns: stop handling (any stop id ends the grammar, only where it may end), rollback across the end.
Does not know: which library follows the text.
"""

from collections.abc import Sequence

from common.engine.structured_output.backend import BackendMatcher
from common.engine.structured_output.vocabulary import UInt32Array
from common.errors import Bug


class RequestMatcher:
    """Implements the `Matcher` port.

    Args:
        inner: follows the text.
        backend: the name of `inner`'s backend, for dispatch when filling.
        stop_token_ids: every EOS and stop id of model and request.
        stop_words: the same as a mask row, uint32 `[num_words]`.
    """

    def __init__(
        self, inner: BackendMatcher, backend: str, stop_token_ids: frozenset[int], stop_words: UInt32Array
    ) -> None:
        self.inner = inner
        self.backend = backend
        self.stop_words = stop_words
        self._stop_token_ids = stop_token_ids
        self._terminated = False
        self._num_accepted = 0

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Advance by sampled tokens. False: one was refused, and the state stays as before that one."""
        for token_id in token_ids:
            if self._terminated:
                return False
            if token_id in self._stop_token_ids:
                if not self.inner.can_end():
                    return False
                self._terminated = True
            elif self.inner.consume(token_id):
                self._num_accepted += 1
            else:
                return False
        return True

    def validate(self, token_ids: Sequence[int]) -> int:
        """How many leading tokens the grammar would accept, a stop at the right place included; state unchanged."""
        if self._terminated:
            return 0
        cut = next((index for index, token in enumerate(token_ids) if token in self._stop_token_ids), None)
        text = token_ids if cut is None else token_ids[:cut]
        num_text = self.inner.validate(text) if text else 0
        if cut is None or num_text < cut:
            return num_text
        return cut + int(self._could_end_after(text))

    def _could_end_after(self, text: Sequence[int]) -> bool:
        for token_id in text:
            if not self.inner.consume(token_id):
                raise Bug("a token that was validated was then refused")
        can_end = self.inner.can_end()
        if text:
            self.inner.rollback(len(text))
        return can_end

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens, the stop token among them."""
        num_text = num_tokens
        if self._terminated and num_tokens > 0:
            num_text -= 1
        if not 0 <= num_text <= self._num_accepted:
            raise ValueError(f"cannot undo {num_tokens} tokens of {self._num_accepted + int(self._terminated)}")
        if num_tokens > 0:
            self._terminated = False
        if num_text:
            self.inner.rollback(num_text)
            self._num_accepted -= num_text

    def forced(self) -> Sequence[int]:
        """Text tokens that must come next, as the tokenizer would write them."""
        return () if self._terminated else self.inner.forced()

    def is_terminated(self) -> bool:
        """Whether a stop token was accepted."""
        return self._terminated

    def can_end(self) -> bool:
        """Whether a stop token is allowed now (never twice)."""
        return not self._terminated and self.inner.can_end()

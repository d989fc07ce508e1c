"""llguidance behind the backend port: the tier that is ready at once and exact in all it accepts.

Owns: the only import of `llguidance`; its limits; turning its error states into `ConstraintRejected`.
Does not know: caches, stop tokens beyond the canonical one, which constraints are sent here.
"""

from collections.abc import Sequence

import llguidance
import numpy as np

from common.engine.structured_output.backend import BackendMatcher, FillRow
from common.engine.structured_output.guidance_source import grammar_source
from common.engine.structured_output.vocabulary import Int32Array, Vocabulary
from common.errors import ConstraintRejected
from common.wire.constraint import Constraint

_MATCHER_BYTES = 96 << 10
"""Resident memory of a fresh matcher beside its grammar text (measured on 49k vocabulary, 200 schemas)."""
_BYTES_PER_GRAMMAR_BYTE = 24
"""Resident memory per byte of grammar text (measured on the same schemas)."""


class _VocabularyAdapter:
    """What `llguidance.LLTokenizer` reads from a tokenizer without a `tokenizer.json`."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.end_token_id
        self.tokens = list(vocabulary.token_bytes)
        self.special_token_ids = sorted(vocabulary.special_token_ids)
        self._encode = vocabulary.encode

    def __call__(self, text: bytes | str) -> list[int]:
        """Canonical tokens of a text the grammar forces."""
        decoded = text.decode(errors="replace") if isinstance(text, bytes) else text
        return self._encode(decoded)


class GuidanceMatcher:
    """One `LLMatcher`. A library error (fuel used up) makes every later answer "nothing allowed".

    Args:
        native: at the beginning.
        first_mask: the mask there, int32 `[num_words]`: a first token need not wait for one.
    """

    def __init__(self, native: llguidance.LLMatcher, first_mask: Int32Array) -> None:
        self.native = native
        self.known_mask: Int32Array | None = first_mask

    def consume(self, token_id: int) -> bool:
        """Advance by one token."""
        self.known_mask = None
        return bool(self.native.try_consume_tokens([token_id]) == 1)

    def validate(self, token_ids: Sequence[int]) -> int:
        """Leading tokens that would be accepted."""
        return 0 if self.native.is_error() else int(self.native.validate_tokens(list(token_ids)))

    def rollback(self, num_tokens: int) -> None:
        """Undo tokens."""
        self.native.rollback(num_tokens)

    def forced(self) -> Sequence[int]:
        """Tokens of the text the grammar forces; the library's own tokenisation of it."""
        return () if self.native.is_error() else list(self.native.compute_ff_tokens())

    def can_end(self) -> bool:
        """Whether the text is complete."""
        return bool(self.native.is_accepting()) and not self.native.is_error()


class GuidanceGrammar:
    """A pristine matcher that requests copy, and its first mask; the copy shares the grammar's tables."""

    def __init__(self, pristine: llguidance.LLMatcher, first_mask: Int32Array, num_source_bytes: int) -> None:
        self._pristine = pristine
        self._first_mask = first_mask
        self._num_bytes = _MATCHER_BYTES + _BYTES_PER_GRAMMAR_BYTE * num_source_bytes + first_mask.nbytes

    @property
    def num_bytes(self) -> int:
        """Estimated resident memory."""
        return self._num_bytes

    def start(self) -> GuidanceMatcher:
        """A copy at the beginning."""
        return GuidanceMatcher(self._pristine.deep_copy(), self._first_mask)


class GuidanceBackend:
    """llguidance over one vocabulary.

    Args:
        vocabulary: the token table.
        num_threads: threads that fill rows in parallel.
    """

    name = "guidance"

    def __init__(self, vocabulary: Vocabulary, num_threads: int = 2) -> None:
        self._tokenizer = _native_tokenizer(vocabulary)
        self._executor = llguidance.LLExecutor(num_threads)
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._num_words = vocabulary.num_words

    def compile(self, constraint: Constraint) -> GuidanceGrammar:
        """Build the grammar and compute its first mask.

        Raises:
            ConstraintRejected: refused by the library, over its limits, or nothing can be generated.
        """
        source = grammar_source(constraint)
        matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        self._refuse_on_error(matcher, constraint)
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)[: self._num_words]
        self._refuse_on_error(matcher, constraint)
        if not mask.any() and not matcher.is_accepting():
            raise ConstraintRejected("no output can satisfy this constraint", constraint.field)
        return GuidanceGrammar(matcher, mask, len(source))

    @staticmethod
    def _refuse_on_error(matcher: llguidance.LLMatcher, constraint: Constraint) -> None:
        if matcher.is_error():
            raise ConstraintRejected(_reason(matcher.get_error()), constraint.field)

    def fill(self, rows: Sequence[FillRow], bitmask: Int32Array) -> None:
        """Fill rows in parallel with the GIL released."""
        pairs = []
        for row in rows:
            matcher = _own(row.matcher)
            if matcher.known_mask is not None:
                bitmask[row.row] = matcher.known_mask
            else:
                pairs.append((matcher.native, row.row))
        words = bitmask.shape[1]
        if len(pairs) == 1:
            native, index = pairs[0]
            native.unsafe_compute_mask_ptr(bitmask.ctypes.data + index * words * 4, words * 4)
        elif pairs:
            self._executor.unsafe_compute_mask_ptr(pairs, bitmask.ctypes.data, words * 4, bitmask.shape[0])
        for native, index in pairs:
            if native.is_error():
                bitmask[index] = 0


def _own(matcher: BackendMatcher) -> GuidanceMatcher:
    if not isinstance(matcher, GuidanceMatcher):
        raise TypeError(f"not a matcher of this backend: {type(matcher).__name__}")
    return matcher


def _native_tokenizer(vocabulary: Vocabulary) -> llguidance.LLTokenizer:
    """From the tokenizer's own description where there is one: forced text is then tokenised without the GIL."""
    description = vocabulary.description
    if description is not None:
        return llguidance.LLTokenizer(description, n_vocab=vocabulary.size, eos_token=vocabulary.end_token_id)
    return llguidance.LLTokenizer(_VocabularyAdapter(vocabulary), n_vocab=vocabulary.size)


def _reason(message: str) -> str:
    """The library's error in one line, without its state dump and without our own coinage for options."""
    text = message.split("<state>")[0].strip()
    if text.startswith("NoExtension"):
        return "no output can satisfy this constraint"
    if text.startswith("oneOf constraints are not supported"):
        return "oneOf with branches that may overlap cannot be enforced exactly"
    if text.startswith("Unimplemented keys"):
        text = text.replace("Unimplemented keys", "keywords that cannot be enforced exactly")
    return " ".join(text.split())[:400]

"""outlines-core behind the backend port: one automaton over tokens, built whole before the first mask.

Owns: the only import of `outlines_core`. Masks are look-ups in a table; building it takes a walk through the vocabulary
per state (0.8 ms with 49k tokens), so it is built in the probe, which hands it over unless it is large.
Takes regexes, choices and JSON schemas that are regular (`exactness`). 0.2.14 loses continuations of a complete text
through an incomplete one (`a(bc)?` never reaches `abc`): it then allows less than was asked for, never more.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import outlines_core
from outlines_core import json_schema

from common.engine.structured_output.backend import BackendMatcher, CompiledGrammar, FillRow
from common.engine.structured_output.json_rules import DEFAULT_WHITESPACE
from common.engine.structured_output.patterns import choice_pattern
from common.engine.structured_output.vocabulary import Int32Array, Vocabulary
from common.errors import ConstraintRejected
from common.wire.constraint import Constraint, ConstraintKind

_MAX_ROLLBACK_TOKENS = 256


class OutlinesMatcher:
    """One `Guide`."""

    def __init__(self, native: outlines_core.Guide) -> None:
        self.native = native

    def consume(self, token_id: int) -> bool:
        """Advance by one token."""
        try:
            self.native.advance(token_id, False)
        except ValueError:
            return False
        return True

    def validate(self, token_ids: Sequence[int]) -> int:
        """Leading tokens that would be accepted."""
        count = len(token_ids)
        while count and not self.native.accepts_tokens(list(token_ids[:count])):
            count -= 1
        return count

    def rollback(self, num_tokens: int) -> None:
        """Undo tokens, at most the last 256."""
        self.native.rollback_state(num_tokens)

    def forced(self) -> Sequence[int]:
        """The library cannot say."""
        return ()

    def can_end(self) -> bool:
        """Whether the automaton is in a final state."""
        return bool(self.native.is_finished())


class OutlinesGrammar:
    """A built index."""

    def __init__(self, index: outlines_core.Index) -> None:
        self._index = index
        self._num_packed_bytes: int | None = None

    def packed(self) -> bytes:
        """The bytes that pickling the index would hold; the library keeps the interpreter while it writes them."""
        packed: bytes = self._index.__reduce__()[1][0]
        self._num_packed_bytes = len(packed)
        return packed

    @property
    def num_bytes(self) -> int:
        """Its packed size, times what hash tables take."""
        num_packed = len(self.packed()) if self._num_packed_bytes is None else self._num_packed_bytes
        return 4 * num_packed

    def start(self) -> OutlinesMatcher:
        """A guide at the initial state."""
        return OutlinesMatcher(outlines_core.Guide(self._index, _MAX_ROLLBACK_TOKENS))


class OutlinesBackend:
    """outlines-core over one vocabulary.

    Args:
        vocabulary: the token table.
    """

    name = "outlines"

    def __init__(self, vocabulary: Vocabulary) -> None:
        by_text: defaultdict[bytes, list[int]] = defaultdict(list)
        for token_id, text in enumerate(vocabulary.token_bytes):
            if text and token_id not in vocabulary.special_token_ids:
                by_text[text].append(token_id)
        self._vocabulary = outlines_core.Vocabulary(vocabulary.end_token_id, dict(by_text))

    def compile(self, constraint: Constraint) -> OutlinesGrammar:
        """Build the index.

        Raises:
            ConstraintRejected: not regular, or refused by the library.
        """
        try:
            index = outlines_core.Index(self._pattern(constraint), self._vocabulary)
        except (ValueError, TypeError, RuntimeError) as error:
            raise ConstraintRejected(" ".join(str(error).split())[:400], constraint.field) from error
        return OutlinesGrammar(index)

    def pack(self, grammar: CompiledGrammar) -> bytes:
        """The index as the library serialises it: milliseconds per megabyte, where building takes seconds."""
        if not isinstance(grammar, OutlinesGrammar):
            raise TypeError(f"not a grammar of this backend: {type(grammar).__name__}")
        return grammar.packed()

    def unpack(self, data: bytes) -> OutlinesGrammar:
        """The index from `pack`."""
        return OutlinesGrammar(outlines_core.Index.from_binary(data))

    def _pattern(self, constraint: Constraint) -> str:
        kind, value = constraint.kind, constraint.value
        if kind is ConstraintKind.REGEX:
            return value
        if kind is ConstraintKind.CHOICE:
            _refuse_prefixes(constraint)
            return choice_pattern(value)
        if kind is ConstraintKind.JSON_SCHEMA:
            whitespace = constraint.whitespace_pattern or (DEFAULT_WHITESPACE if constraint.any_whitespace else "")
            return str(json_schema.build_regex_from_schema(value, whitespace))
        raise ConstraintRejected(f"the outlines backend does not take {kind.value}", constraint.field)

    def fill(self, rows: Sequence[FillRow], bitmask: Int32Array) -> None:
        """Look masks up, one after the other."""
        words = bitmask.shape[1]
        for row in rows:
            bitmask[row.row] = 0
            pointer = bitmask.ctypes.data + row.row * words * 4
            self._native(row.matcher).write_mask_into(pointer, words, 4)

    @staticmethod
    def _native(matcher: BackendMatcher) -> outlines_core.Guide:
        if not isinstance(matcher, OutlinesMatcher):
            raise TypeError(f"not a matcher of this backend: {type(matcher).__name__}")
        return matcher.native


def _refuse_prefixes(constraint: Constraint) -> None:
    """A choice that begins with another could never be finished here (see the module's text)."""
    choices = sorted(json.loads(constraint.value))
    for one, following in pairwise(choices):
        if following.startswith(one):
            raise ConstraintRejected(
                f"outlines cannot tell the choice {following!r} from its beginning {one!r}", constraint.field
            )

"""xgrammar behind the backend port: slower to compile, microseconds per mask afterwards.

Owns: the only import of `xgrammar`; the language rules on this backend. Its compile cannot be interrupted, and it
widens what it lacks without an error: what may be sent here is decided elsewhere (`exactness`, `probe`).
"""

from collections.abc import Callable, Sequence

from common.engine.structured_output.backend import BackendMatcher, FillRow
from common.engine.structured_output.json_rules import MAX_WHITESPACE
from common.engine.structured_output.lean_import import standing_in
from common.engine.structured_output.vocabulary import Int32Array, Vocabulary
from common.errors import ConstraintRejected
from common.wire.constraint import Constraint, ConstraintKind

with standing_in("transformers"):
    import xgrammar


class XGrammarMatcher:
    """One `GrammarMatcher` with unlimited rollback.

    Args:
        native: at the beginning.
        end_token_id: the canonical end token.
        encode: canonical tokens of a text.
    """

    def __init__(
        self, native: xgrammar.GrammarMatcher, end_token_id: int, encode: Callable[[str], Sequence[int]]
    ) -> None:
        self.native = native
        self._end_token_id = end_token_id
        self._encode = encode

    def consume(self, token_id: int) -> bool:
        """Advance by one token."""
        return bool(self.native.accept_token(token_id))

    def validate(self, token_ids: Sequence[int]) -> int:
        """Leading tokens that would be accepted; the library has no dry run, so accept and undo."""
        num_accepted = 0
        for token_id in token_ids:
            if not self.native.accept_token(token_id):
                break
            num_accepted += 1
        if num_accepted:
            self.native.rollback(num_accepted)
        return num_accepted

    def rollback(self, num_tokens: int) -> None:
        """Undo tokens."""
        self.native.rollback(num_tokens)

    def forced(self) -> Sequence[int]:
        """Tokens of the text the grammar forces."""
        text = self.native.find_jump_forward_string()
        return self._encode(text) if text else ()

    def can_end(self) -> bool:
        """Whether the end token would be accepted."""
        if not self.native.accept_token(self._end_token_id):
            return False
        self.native.rollback(1)
        return True


class XGrammarGrammar:
    """A compiled grammar."""

    def __init__(
        self, native: xgrammar.CompiledGrammar, end_token_id: int, encode: Callable[[str], Sequence[int]]
    ) -> None:
        self._native = native
        self._end_token_id = end_token_id
        self._encode = encode

    @property
    def num_bytes(self) -> int:
        """As the library counts it."""
        return int(self._native.memory_size_bytes)

    def start(self) -> XGrammarMatcher:
        """A matcher at the beginning."""
        native = xgrammar.GrammarMatcher(self._native, override_stop_tokens=[self._end_token_id])
        return XGrammarMatcher(native, self._end_token_id, self._encode)


class XGrammarBackend:
    """xgrammar over one vocabulary.

    Args:
        vocabulary: the token table.
        num_threads: threads of one compile and of a batch fill.
    """

    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary, num_threads: int = 1) -> None:
        self._end_token_id = vocabulary.end_token_id
        self._encode = vocabulary.encode
        text = [
            b"" if token_id in vocabulary.special_token_ids else token
            for token_id, token in enumerate(vocabulary.token_bytes)
        ]
        info = xgrammar.TokenizerInfo(
            text,
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary.size,
            stop_token_ids=[vocabulary.end_token_id],
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=num_threads, cache_enabled=False)
        self._batch = xgrammar.BatchGrammarMatcher(max_threads=num_threads)

    def compile(self, constraint: Constraint) -> XGrammarGrammar:
        """Compile on this thread; may take very long on a hostile input.

        Raises:
            ConstraintRejected: the library refuses it.
        """
        try:
            native = self._compile(constraint)
        except (RuntimeError, ValueError, TypeError) as error:
            raise ConstraintRejected(_reason(error), constraint.field) from error
        return XGrammarGrammar(native, self._end_token_id, self._encode)

    def _compile(self, constraint: Constraint) -> xgrammar.CompiledGrammar:
        kind, value = constraint.kind, constraint.value
        if kind is ConstraintKind.JSON_SCHEMA:
            return self._compile_json(value, constraint)
        if kind is ConstraintKind.JSON_OBJECT:
            return self._compile_json('{"type":"object"}', constraint)
        if kind is ConstraintKind.REGEX:
            return self._compiler.compile_regex(value)
        if kind is ConstraintKind.GRAMMAR:
            return self._compiler.compile_grammar(value)
        if kind is ConstraintKind.STRUCTURAL_TAG:
            return self._compiler.compile_structural_tag(value)
        raise ConstraintRejected(f"the xgrammar backend does not take {kind.value}", constraint.field)

    def _compile_json(self, schema: str, constraint: Constraint) -> xgrammar.CompiledGrammar:
        if constraint.whitespace_pattern is not None:
            raise ConstraintRejected("the xgrammar backend takes no whitespace_pattern", constraint.field)
        return self._compiler.compile_json_schema(
            schema,
            any_whitespace=constraint.any_whitespace,
            separators=None if constraint.any_whitespace else (",", ":"),
            strict_mode=False,
            max_whitespace_cnt=MAX_WHITESPACE if constraint.any_whitespace else None,
        )

    def fill(self, rows: Sequence[FillRow], bitmask: Int32Array) -> None:
        """Fill rows; in parallel with the GIL released when there are several."""
        natives = [self._native(row.matcher) for row in rows]
        if len(natives) == 1:
            natives[0].fill_next_token_bitmask(bitmask, rows[0].row)
        elif natives:
            self._batch.batch_fill_next_token_bitmask(natives, bitmask, [row.row for row in rows])

    @staticmethod
    def _native(matcher: BackendMatcher) -> xgrammar.GrammarMatcher:
        if not isinstance(matcher, XGrammarMatcher):
            raise TypeError(f"not a matcher of this backend: {type(matcher).__name__}")
        return matcher.native


def _reason(error: Exception) -> str:
    """The library's error in one line, without its source positions."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    text = lines[-1] if lines else type(error).__name__
    return " ".join(text.split())[:400]

"""The port of a grammar library: compile, start a matcher, fill masks.

Owns: the protocols every backend implements and the errors they may raise. One adapter file per library.
Does not know: requests, stop tokens beyond one canonical end token, caches, threads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from common.engine.structured_output.vocabulary import Int32Array
from common.wire.constraint import Constraint


class BackendMatcher(Protocol):
    """Where one sequence stands, in text tokens only: stop tokens never reach it. Not thread-safe."""

    def consume(self, token_id: int) -> bool:
        """Advance by one text token. False: refused, and the state is unchanged."""
        ...

    def validate(self, token_ids: Sequence[int]) -> int:
        """How many leading text tokens would be accepted. The state is unchanged."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` consumed tokens."""
        ...

    def can_end(self) -> bool:
        """Whether the text so far is a word of the language."""
        ...

    def forced(self) -> Sequence[int]:
        """Tokens that must come next, as the tokenizer would write them; empty where the library cannot say."""
        ...


class CompiledGrammar(Protocol):
    """A grammar ready to be followed; immutable and shared between requests."""

    @property
    def num_bytes(self) -> int:
        """Memory it holds, estimated; what the cache counts."""
        ...

    def start(self) -> BackendMatcher:
        """A matcher at the beginning."""
        ...


@dataclass(frozen=True, slots=True)
class FillRow:
    """One row of a bitmask to be filled."""

    matcher: BackendMatcher
    row: int


class Backend(Protocol):
    """One grammar library over one vocabulary. Thread-safe."""

    @property
    def name(self) -> str:
        """As in `GrammarConfig.backend`."""
        ...

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """Compile, on the caller's thread.

        Raises:
            ConstraintRejected: the library refuses it; the message is the library's reason in one line.
        """
        ...

    def fill(self, rows: Sequence[FillRow], bitmask: Int32Array) -> None:
        """Write the next-token mask of each matcher into its row.

        The canonical end token's bit is set exactly where the matcher can end. A matcher that cannot say what is
        allowed gets an all-zero row.

        Args:
            rows: matchers of this backend's grammars; row numbers are distinct.
            bitmask: int32 `[num_rows, ceil(vocab_size / 32)]`, contiguous; only the named rows are written.
        """
        ...


@runtime_checkable
class PortableBackend(Protocol):
    """A backend whose grammars may be compiled in one process and used in another, for much less than compiling."""

    def pack(self, grammar: CompiledGrammar) -> bytes:
        """The grammar for `unpack` of the same library over the same vocabulary."""
        ...

    def unpack(self, data: bytes) -> CompiledGrammar:
        """The grammar that was packed; nothing is compiled."""
        ...

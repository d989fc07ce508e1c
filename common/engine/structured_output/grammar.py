"""The ports of structured output: engine-level service, compiled grammar ticket, request-level matcher, batch mask.

Owns: the protocols the core and the serving layer program against. Idea of the two levels: vLLM 0.32
`v1/structured_output/backend_types.py` (StructuredOutputBackend / StructuredOutputGrammar).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from common.engine.structured_output.thinking import Thinking
from common.errors import ConstraintRejected
from common.wire.constraint import Constraint


class CompileState(Enum):
    """Life of one compilation."""

    COMPILING = "compiling"
    READY = "ready"
    FAILED = "failed"


class GrammarTicket(Protocol):
    """One asked-for compilation, shared by every request with an equal constraint."""

    @property
    def state(self) -> CompileState:
        """Where it stands; READY and FAILED are final."""
        ...

    @property
    def error(self) -> ConstraintRejected | None:
        """Why it FAILED; None otherwise."""
        ...

    @property
    def backend(self) -> str | None:
        """Name of the backend that serves it, once READY."""
        ...

    @property
    def compile_s(self) -> float | None:
        """Seconds from asking to the final state; 0.0 for a cache hit."""
        ...

    def on_settled(self, callback: Callable[[], None]) -> None:
        """Call `callback` once it is READY or FAILED, from any thread; at once if it already is."""
        ...


class Matcher(Protocol):
    """Where one sequence stands in its grammar. Used by one thread at a time (the step loop)."""

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Advance by sampled tokens. False: one was refused, and the state stays as before that one."""
        ...

    def validate(self, token_ids: Sequence[int]) -> int:
        """How many leading tokens the grammar would accept. Does not change the state."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens."""
        ...

    def forced(self) -> Sequence[int]:
        """Text tokens that must come next, as the tokenizer would write them; empty where there is a choice.

        A guess at the spelling: the same text in other tokens is as right.
        """
        ...

    def is_terminated(self) -> bool:
        """Whether the grammar has ended and its stop token was accepted."""
        ...

    def can_end(self) -> bool:
        """Whether the text so far is complete, i.e. a stop token is allowed now."""
        ...


@dataclass(frozen=True, slots=True)
class MaskRow:
    """A logits row whose matcher's next-token mask is wanted, and one more row behind each token of `draft`.

    The draft is what `Matcher.validate` accepted of it; the matcher stands where it stood once the masks are filled.
    """

    row: int
    matcher: Matcher
    draft: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        """Mask rows it takes."""
        return 1 + len(self.draft)


class PendingBitmask(Protocol):
    """Masks being filled while the forward runs."""

    def wait(self) -> torch.Tensor:
        """The filled masks: int32 CPU `[num_rows, ceil(vocab_size / 32)]`, bit set = token allowed, in `rows` order.

        A matcher that cannot say what is allowed gets an all-zero row: the sampler turns that into `NoTokenAllowed`.
        """
        ...


class GrammarService(Protocol):
    """Engine-level structured output; thread-safe."""

    def check(self, constraint: Constraint) -> None:
        """Cheap refusal at the door (empty value, unknown kind, nesting, size). Raises `ConstraintRejected`."""
        ...

    def compile(self, constraint: Constraint) -> GrammarTicket:
        """Ask for the grammar; returns at once. Equal constraints share one ticket or hit the cache."""
        ...

    def start_matcher(
        self, ticket: GrammarTicket, stop_token_ids: frozenset[int], thinking: Thinking = Thinking.NONE
    ) -> Matcher:
        """A fresh matcher of a READY ticket; `stop_token_ids` (EOS included) only where it may end.

        The grammar begins behind the model's `thinking`, where there is any.
        """
        ...

    def fill(self, rows: Sequence[MaskRow]) -> PendingBitmask:
        """Begin filling; returns at once."""
        ...

    def close(self) -> None:
        """Stop compiling and end helper threads or processes."""
        ...

"""A grammar service whose compilations settle when the test says so; its language is "tokens of one set, then EOS"."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from common.engine.structured_output.grammar import CompileState, GrammarTicket, MaskRow, Matcher
from common.engine.structured_output.thinking import Thinking
from common.errors import ConstraintRejected
from common.wire.constraint import Constraint, ConstraintKind
from tests.support.fake_model import VOCAB_SIZE


def up_to(num_tokens: int, allowed: Sequence[int] = tuple(range(1, VOCAB_SIZE))) -> Constraint:
    """The language of exactly `num_tokens` tokens out of `allowed`, then a stop token."""
    value = ",".join(map(str, (num_tokens, *allowed)))
    return Constraint(kind=ConstraintKind.REGEX, value=value)


@dataclass
class FakeTicket:
    """A `GrammarTicket`; `settle` makes it READY, or FAILED with an error."""

    constraint: Constraint
    state: CompileState = CompileState.COMPILING
    error: ConstraintRejected | None = None
    backend: str | None = "fake"
    compile_s: float | None = None
    callbacks: list[Callable[[], None]] = field(default_factory=list)

    def settle(self, error: ConstraintRejected | None = None) -> None:
        if self.state is not CompileState.COMPILING:
            return
        self.error = error
        self.state = CompileState.READY if error is None else CompileState.FAILED
        for callback in self.callbacks:
            callback()

    def on_settled(self, callback: Callable[[], None]) -> None:
        if self.state is CompileState.COMPILING:
            self.callbacks.append(callback)
        else:
            callback()


@dataclass
class FakeMatcher:
    """Accepts `length` tokens of `allowed`, then a stop token."""

    length: int
    allowed: frozenset[int]
    stops: frozenset[int]
    accepted: list[int] = field(default_factory=list)
    refuses_everything: bool = False
    raises: Exception | None = None

    def choices(self) -> frozenset[int]:
        if self.is_terminated():
            return frozenset()
        return self.stops if len(self.accepted) >= self.length else self.allowed

    def accept(self, token_ids: Sequence[int]) -> bool:
        if self.raises is not None:
            raise self.raises
        for token_id in token_ids:
            if self.refuses_everything or token_id not in self.choices():
                return False
            self.accepted.append(token_id)
        return True

    def validate(self, token_ids: Sequence[int]) -> int:
        num_before = len(self.accepted)
        for token_id in token_ids:
            if not self.accept((token_id,)):
                break
        num_accepted = len(self.accepted) - num_before
        self.rollback(num_accepted)
        return num_accepted

    def forced(self) -> Sequence[int]:
        choices = self.choices() - self.stops
        return tuple(choices) * (self.length - len(self.accepted)) if len(choices) == 1 else ()

    def rollback(self, num_tokens: int) -> None:
        del self.accepted[len(self.accepted) - num_tokens :]

    def is_terminated(self) -> bool:
        return len(self.accepted) > self.length

    def can_end(self) -> bool:
        return len(self.accepted) == self.length


@dataclass(frozen=True)
class FakeBitmask:
    masks: torch.Tensor

    def wait(self) -> torch.Tensor:
        return self.masks


@dataclass
class FakeGrammars:
    """A `GrammarService`. With `auto` every compilation is READY at once."""

    auto: bool = False
    tickets: list[FakeTicket] = field(default_factory=list)
    matchers: list[FakeMatcher] = field(default_factory=list)

    def check(self, constraint: Constraint) -> None: ...

    def compile(self, constraint: Constraint) -> GrammarTicket:
        ticket = FakeTicket(constraint)
        self.tickets.append(ticket)
        if self.auto:
            ticket.settle()
        return ticket

    def start_matcher(
        self, ticket: GrammarTicket, stop_token_ids: frozenset[int], thinking: Thinking = Thinking.NONE
    ) -> Matcher:
        del thinking
        assert isinstance(ticket, FakeTicket)
        assert ticket.state is CompileState.READY
        length, *allowed = map(int, ticket.constraint.value.split(","))
        self.matchers.append(FakeMatcher(length, frozenset(allowed), stop_token_ids))
        return self.matchers[-1]

    def fill(self, rows: Sequence[MaskRow]) -> FakeBitmask:
        bits = np.zeros((sum(row.num_rows for row in rows), -(-VOCAB_SIZE // 32) * 32), dtype=np.uint8)
        places = iter(bits)
        for row in rows:
            assert isinstance(row.matcher, FakeMatcher)
            next(places)[sorted(row.matcher.choices())] = 1
            for token_id in row.draft:
                assert row.matcher.accept((token_id,)), "a draft that was not validated"
                next(places)[sorted(row.matcher.choices())] = 1
            row.matcher.rollback(len(row.draft))
        return FakeBitmask(torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32)))

    def close(self) -> None: ...

"""Answers under a constraint that the masks enforce only in part (`on_inexact: validate`): checked when they end.

Owns: when to check, what the answer says about it. Does not know: schemas.
"""

import asyncio
from collections import defaultdict
from dataclasses import replace
from typing import Protocol

from common.engine.request_state import FinishReason
from common.engine.structured_output.grammar import GrammarTicket
from common.engine.structured_output.ticket import Ticket
from common.openai.responses import ConstraintCheck
from common.serving.generation import ChoiceDelta, Sink
from common.serving.shaping.reasoning import ReasoningTags
from common.wire.constraint import Constraint


class InexactGrammars(Protocol):
    """The part of the grammar service that knows what was left out."""

    def compile(self, constraint: Constraint) -> GrammarTicket:
        """The ticket of a constraint; at once for one that is in use."""
        ...

    def why_invalid(self, ticket: GrammarTicket, text: str) -> str | None:
        """What is wrong with a finished text; None when nothing is. May take long."""
        ...


class FinalCheck:
    """Checks finished texts.

    Args:
        grammars: knows what was left out.
        reasoning: tags of the model's thinking, which is no part of the constrained text.
    """

    def __init__(self, grammars: InexactGrammars, reasoning: ReasoningTags | None) -> None:
        self._grammars = grammars
        self._reasoning = reasoning

    async def check(self, constraint: Constraint, text: str) -> ConstraintCheck | None:
        """What the answer says; None where the masks enforced everything."""
        ticket = self._grammars.compile(constraint)
        unenforced = ticket.unenforced if isinstance(ticket, Ticket) else ()
        if not unenforced:
            return None
        if self._reasoning is not None:
            before, found, after = text.partition(self._reasoning.end)
            text = after if found else before
        reason = await asyncio.to_thread(self._grammars.why_invalid, ticket, text)
        return ConstraintCheck(unenforced=unenforced, valid=reason is None, reason=reason)


class CheckingSink:
    """Passes deltas on; the last one of each choice with the check of its whole text.

    Args:
        inner: where they go.
        check: does the checking.
        constraint: of the job.
    """

    def __init__(self, inner: Sink, check: FinalCheck, constraint: Constraint) -> None:
        self._inner = inner
        self._check = check
        self._constraint = constraint
        self._texts: dict[int, list[str]] = defaultdict(list)

    async def push(self, delta: ChoiceDelta) -> None:
        """See `Sink`. A text that was cut short is not checked: it is no answer to the constraint."""
        self._texts[delta.index].append(delta.text)
        if delta.finish is FinishReason.STOP:
            verdict = await self._check.check(self._constraint, "".join(self._texts.pop(delta.index)))
            delta = replace(delta, constraint_check=verdict)
        await self._inner.push(delta)

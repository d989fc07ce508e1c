"""One compilation as its askers see it.

Owns: COMPILING -> READY | FAILED, and who is told. Written by the service's compile thread, read by any.
Does not know: what is compiled.
"""

import threading
from collections.abc import Callable

from common.engine.structured_output.backend import CompiledGrammar
from common.engine.structured_output.grammar import CompileState
from common.errors import Bug, ConstraintRejected
from common.state_machine import Transitions
from common.wire.constraint import Constraint

COMPILE_TRANSITIONS = Transitions(
    {
        CompileState.COMPILING: {CompileState.READY, CompileState.FAILED},
        CompileState.READY: set(),
        CompileState.FAILED: set(),
    }
)


class Ticket:
    """Implements `GrammarTicket`; shared by every request with an equal constraint.

    Args:
        constraint: what was asked for.
        asked_s: the clock when it was.
    """

    def __init__(self, constraint: Constraint, asked_s: float) -> None:
        self.constraint = constraint
        self.asked_s = asked_s
        self._lock = threading.Lock()
        self._state = CompileState.COMPILING
        self._error: ConstraintRejected | None = None
        self._grammar: CompiledGrammar | None = None
        self._backend: str | None = None
        self._compile_s: float | None = None
        self._unenforced: tuple[str, ...] = ()
        self._callbacks: list[Callable[[], None]] = []

    @property
    def state(self) -> CompileState:
        """Where it stands."""
        return self._state

    @property
    def error(self) -> ConstraintRejected | None:
        """Why it FAILED."""
        return self._error

    @property
    def backend(self) -> str | None:
        """Who serves it, once READY."""
        return self._backend

    @property
    def compile_s(self) -> float | None:
        """Seconds from asking to the final state."""
        return self._compile_s

    @property
    def unenforced(self) -> tuple[str, ...]:
        """Keywords the masks do not enforce (`on_inexact: validate`): the finished text must be checked for them."""
        return self._unenforced

    @property
    def grammar(self) -> CompiledGrammar:
        """The compiled grammar. Raises `Bug` unless READY."""
        if self._grammar is None:
            raise Bug(f"the grammar of a ticket that is {self._state.value}")
        return self._grammar

    def on_settled(self, callback: Callable[[], None]) -> None:
        """Call `callback` once it is final, from any thread; at once if it already is."""
        with self._lock:
            if self._state is CompileState.COMPILING:
                self._callbacks.append(callback)
                return
        callback()

    def succeed(self, grammar: CompiledGrammar, backend: str, now_s: float, unenforced: tuple[str, ...] = ()) -> None:
        """COMPILING -> READY."""
        self._grammar, self._backend, self._unenforced = grammar, backend, unenforced
        self.move_to(CompileState.READY, now_s)

    def fail(self, error: ConstraintRejected, now_s: float) -> None:
        """COMPILING -> FAILED."""
        self._error = error
        self.move_to(CompileState.FAILED, now_s)

    def move_to(self, state: CompileState, now_s: float) -> None:
        """Enter a final state and tell everyone who waits; `succeed` and `fail` are the ways in."""
        with self._lock:
            COMPILE_TRANSITIONS.check(self._state, state)
            self._compile_s = now_s - self.asked_s
            self._state = state
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

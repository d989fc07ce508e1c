"""What the routes find behind them: nothing while the model loads, then the parts of a running engine.

Owns: the three conditions of an engine process (starting, serving, draining). Does not know: routes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from common.clock import Clock
from common.engine.structured_output.grammar import GrammarService
from common.errors import NotReady
from common.serving.intake import Intake
from common.serving.kv_intent import KvGate
from common.serving.ports import Engine, KvControl
from common.serving.respond import Responder
from common.serving.served_model import ServedModel
from common.state_machine import Transitions


class Condition(Enum):
    """Where an engine process stands."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


_TRANSITIONS = Transitions(
    {
        Condition.STARTING: {Condition.SERVING, Condition.DRAINING},
        Condition.SERVING: {Condition.DRAINING},
        Condition.DRAINING: set(),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A running engine, as its routes use it.

    Attributes:
        engine: where requests go.
        is_alive: whether the step loop and the transfer thread can still serve.
        kv_control: P's answers to readers; None on D.
    """

    model: ServedModel
    engine: Engine
    kv: KvGate
    intake: Intake
    responder: Responder
    grammars: GrammarService
    clock: Clock
    is_alive: Callable[[], bool]
    kv_control: KvControl | None = None


class Surface:
    """The parts, once there are any. Event loop only."""

    def __init__(self) -> None:
        self._condition = Condition.STARTING
        self._parts: Parts | None = None

    @property
    def condition(self) -> Condition:
        """Where the process stands."""
        return self._condition

    @property
    def is_alive(self) -> bool:
        """False once a thread of a running engine has died."""
        return self._parts is None or self._parts.is_alive()

    def open(self, parts: Parts) -> None:
        """Loading is over: serve."""
        self._move_to(Condition.SERVING)
        self._parts = parts

    def drain(self) -> None:
        """Take nothing new. Idempotent."""
        if self._condition is not Condition.DRAINING:
            self._move_to(Condition.DRAINING)

    def require(self) -> Parts:
        """The parts.

        Raises:
            NotReady: the engine is loading, draining or dead.
        """
        if self._condition is Condition.DRAINING:
            raise NotReady("the engine is shutting down", retry_after_s=1.0)
        if self._parts is None:
            raise NotReady("the engine is loading its model", retry_after_s=1.0)
        if not self._parts.is_alive():
            raise NotReady("the engine has died", retry_after_s=5.0)
        return self._parts

    def _move_to(self, condition: Condition) -> None:
        _TRANSITIONS.check(self._condition, condition)
        self._condition = condition

"""Phases of one request inside the proxy, their legal order, and when each began.

Owns: the enum, its table, the one writer of the phase. Does not know: what happens in a phase.
"""

from enum import Enum

from common.clock import Clock
from common.state_machine import Transitions


class ProxyPhase(Enum):
    """Where a request stands (DESIGN §3, last column)."""

    RECEIVED = "received"
    ROUTED = "routed"
    PREFILLING = "prefilling"
    HANDED_OFF = "handed_off"
    STREAMING = "streaming"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is slower by a Python call


_ENDS = {ProxyPhase.FAILED, ProxyPhase.CANCELLED}

PHASES = Transitions(
    {
        ProxyPhase.RECEIVED: {ProxyPhase.ROUTED, *_ENDS},
        # -> HANDED_OFF: prefill skipped, D computes the prompt itself
        ProxyPhase.ROUTED: {ProxyPhase.PREFILLING, ProxyPhase.HANDED_OFF, *_ENDS},
        # -> PREFILLING: another P after a failure
        ProxyPhase.PREFILLING: {ProxyPhase.PREFILLING, ProxyPhase.HANDED_OFF, *_ENDS},
        # -> HANDED_OFF: another D after a failure
        ProxyPhase.HANDED_OFF: {ProxyPhase.HANDED_OFF, ProxyPhase.STREAMING, *_ENDS},
        ProxyPhase.STREAMING: {ProxyPhase.DONE, *_ENDS},
        ProxyPhase.DONE: set(),
        ProxyPhase.FAILED: set(),
        ProxyPhase.CANCELLED: set(),
    }
)


class PhaseTrack:
    """The phase of one request and the instants of the proxy's clock at which phases began.

    Args:
        clock: the proxy's clock.
        received_s: when the request came in.
    """

    __slots__ = ("_clock", "first_s", "last_s", "phase")

    def __init__(self, clock: Clock, received_s: float) -> None:
        self._clock = clock
        self.phase = ProxyPhase.RECEIVED
        self.first_s: dict[ProxyPhase, float] = {ProxyPhase.RECEIVED: received_s}
        self.last_s: dict[ProxyPhase, float] = {ProxyPhase.RECEIVED: received_s}

    def move_to(self, phase: ProxyPhase) -> None:
        """Enter `phase` now.

        Raises:
            IllegalTransition: the table has no such move.
        """
        PHASES.check(self.phase, phase)
        self.phase = phase
        now_s = self._clock.now_s()
        self.first_s.setdefault(phase, now_s)
        self.last_s[phase] = now_s

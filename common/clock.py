"""Time as a collaborator: a clock that is passed in, and deadlines made from it.

Owns: the only reads of the system clock. Between processes only durations (remaining seconds) travel, never instants.
"""

import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """A source of time; one per process, handed down from `main.py`."""

    def now_s(self) -> float:
        """Monotonic seconds; differences mean something, the value does not."""
        ...

    def wall_s(self) -> float:
        """Seconds since the Unix epoch, for `created` fields and logs only."""
        ...


class SystemClock:
    """The machine's clock."""

    def now_s(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def wall_s(self) -> float:
        """Unix seconds."""
        return time.time()


class ManualClock:
    """A clock that moves only when told; shipped for tests (idea: trio's MockClock)."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        """The time last set."""
        return self._now_s

    def wall_s(self) -> float:
        """The same value as `now_s`."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds` (>= 0)."""
        if seconds < 0:
            raise ValueError(f"time does not run backwards: {seconds}")
        self._now_s += seconds


@dataclass(frozen=True, slots=True)
class Deadline:
    """An instant of one clock by which work must be done; made at the edge and passed down."""

    clock: Clock
    at_s: float

    @classmethod
    def after(cls, clock: Clock, seconds: float) -> "Deadline":
        """A deadline `seconds` from now."""
        return cls(clock, clock.now_s() + seconds)

    def remaining_s(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, self.at_s - self.clock.now_s())

    def has_passed(self) -> bool:
        """Whether no time is left."""
        return self.clock.now_s() >= self.at_s

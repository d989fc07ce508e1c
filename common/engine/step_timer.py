"""How long the parts of a step take.

Owns: the sums behind `pd_step_seconds`. Does not know: what the parts do.
"""

from enum import IntEnum
from operator import add

from common.clock import Clock
from common.engine.status import StepSeconds


class StepPart(IntEnum):
    """Parts of a step, in order. On CUDA `FORWARD` is the launch; the device's time shows under `SAMPLE`."""

    PLAN = 0
    FORWARD = 1
    MASK_WAIT = 2
    SAMPLE = 3
    APPLY = 4


class StepTimer:
    """Laps of one step after another; a step counts once it reaches `APPLY`, laps of an empty plan are dropped."""

    def __init__(self, clock: Clock) -> None:
        self.num_steps = 0
        self._clock = clock
        self._last_s = 0.0
        self._laps_s = [0.0] * len(StepPart)
        self._totals_s = [0.0] * len(StepPart)

    def start(self) -> None:
        """A step begins; forget the laps of one that never reached its end."""
        self._laps_s = [0.0] * len(StepPart)
        self._last_s = self._clock.now_s()

    def lap(self, part: StepPart) -> None:
        """`part` ended now."""
        now_s = self._clock.now_s()
        self._laps_s[part] = now_s - self._last_s
        self._last_s = now_s
        if part is StepPart.APPLY:
            self.num_steps += 1
            self._totals_s = list(map(add, self._totals_s, self._laps_s))

    def totals(self) -> StepSeconds:
        """Sums since the start."""
        return StepSeconds(*self._totals_s)

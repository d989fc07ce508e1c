"""How long the parts of a step take.

Owns: the sums behind `pd_step_seconds`. Does not know: what the parts do.
"""

from enum import Enum

from common.clock import Clock
from common.engine.status import StepSeconds


class StepPart(Enum):
    """Parts of a step, in order. On CUDA `FORWARD` is the launch; the device's time shows under `SAMPLE`."""

    PLAN = "plan"
    FORWARD = "forward"
    MASK_WAIT = "mask_wait"
    SAMPLE = "sample"
    APPLY = "apply"


class StepTimer:
    """Laps of one step after another; a step counts once it reaches `APPLY`, laps of an empty plan are dropped."""

    def __init__(self, clock: Clock) -> None:
        self.num_steps = 0
        self._clock = clock
        self._last_s = 0.0
        self._laps_s: dict[StepPart, float] = {}
        self._totals_s = dict.fromkeys(StepPart, 0.0)

    def start(self) -> None:
        """A step begins; forget the laps of one that never reached its end."""
        self._laps_s = {}
        self._last_s = self._clock.now_s()

    def lap(self, part: StepPart) -> None:
        """`part` ended now."""
        now_s = self._clock.now_s()
        self._laps_s[part] = now_s - self._last_s
        self._last_s = now_s
        if part is StepPart.APPLY:
            self.num_steps += 1
            for each, seconds in self._laps_s.items():
                self._totals_s[each] += seconds

    def totals(self) -> StepSeconds:
        """Sums since the start."""
        return StepSeconds(**{part.value: seconds for part, seconds in self._totals_s.items()})

"""A circuit breaker per engine, fed by the real traffic of both legs.

Owns: when a leg may try an engine after legs failed on it. 4xx answers are not failures and are never recorded.
Does not know: probes, HTTP.

One failure already makes the engine suspect, until a leg succeeds or a probe that was sent later does: suspects are
routed to only where there is nobody else, so that not every request pays for finding out anew.

    CLOSED ──failures in a row──► OPEN ──cooldown──► HALF_OPEN (one leg may try) ──success──► CLOSED
                                    ▲──────────────── failure ─────┘
"""

from enum import Enum

from common.clock import Clock


class BreakerState(Enum):
    """Whether legs may go to the engine."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Counts failures in a row.

    Args:
        clock: source of time.
        max_failures: failures in a row that open the circuit.
        cooldown_s: how long it stays open before one trial.

    Attributes:
        is_suspect: whether the last that was heard of the engine is a failed leg.
    """

    def __init__(self, clock: Clock, max_failures: int, cooldown_s: float) -> None:
        self._clock = clock
        self._max_failures = max_failures
        self._cooldown_s = cooldown_s
        self._num_failures = 0
        self._opened_s: float | None = None
        self._trial_s: float | None = None
        self.is_suspect = False

    @property
    def status(self) -> BreakerState:
        """State now; time alone turns OPEN into HALF_OPEN."""
        if self._opened_s is None:
            return BreakerState.CLOSED
        is_cool = self._clock.now_s() - self._opened_s >= self._cooldown_s
        return BreakerState.HALF_OPEN if is_cool else BreakerState.OPEN

    def allows(self) -> bool:
        """Whether a leg may be sent now; changes nothing."""
        if self._opened_s is None:
            return True
        status = self.status
        if status is BreakerState.HALF_OPEN:
            # A trial that never reported back (its request was cancelled) must not lock the engine out for good.
            return self._trial_s is None or self._clock.now_s() - self._trial_s >= self._cooldown_s
        return False

    def on_sent(self) -> None:
        """A leg goes out; in HALF_OPEN it is the trial."""
        if self._opened_s is not None:
            self._trial_s = self._clock.now_s()

    def on_success(self) -> None:
        """An answer came, of whatever status below 500."""
        self._num_failures = 0
        self._opened_s = self._trial_s = None
        self.is_suspect = False

    def on_probed(self) -> None:
        """A probe that was sent while it was suspect was answered well; failures in a row stay counted."""
        self.is_suspect = False

    def on_failure(self) -> None:
        """No answer, a broken one, or a 5xx."""
        self._num_failures += 1
        self.is_suspect = True
        if self._num_failures >= self._max_failures or self._opened_s is not None:
            self._opened_s = self._clock.now_s()
            self._trial_s = None

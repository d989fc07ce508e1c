"""Time limits of everything that waits: cheap to set, kept by one look at all of them every so often.

Owns: the limits that run now, and ending those that ran out or whose engine was found dead.
A timer per wait would cost more than all the rest a leg does in Python; limits here are seconds, a look is 50 ms.
"""

import asyncio
from collections.abc import Hashable
from types import TracebackType

from common.clock import Clock

_LOOK_S = 0.05


class TimeLimits:
    """The limits of one event loop.

    Args:
        clock: what limits are measured by.

    Attributes:
        running: limits that somebody is inside of; `Limit` alone changes it.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.running: set[Limit] = set()
        self._look: asyncio.TimerHandle | None = None

    @property
    def num_running(self) -> int:
        """Limits that somebody is inside of."""
        return len(self.running)

    def limit(self, seconds: float, owner: Hashable = None) -> "Limit":
        """A context manager whose block may run for `seconds`.

        Leaving it raises:
            TimeoutError: time ran out, or `expire` was called for `owner`.
        """
        return Limit(self, seconds, owner)

    def expire(self, owner: Hashable) -> None:
        """Let every limit of `owner` run out now."""
        for limit in [limit for limit in self.running if limit.owner is owner]:
            limit.run_out()

    def keep_looking(self) -> None:
        """For `Limit`: one has begun."""
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(_LOOK_S, self._look_at_all)

    def _look_at_all(self) -> None:
        now_s = self.clock.now_s()
        for limit in [limit for limit in self.running if limit.ends_s <= now_s]:
            limit.run_out()
        # Nobody waits: no more looks until somebody does, so that an idle proxy stays idle.
        self._look = asyncio.get_running_loop().call_later(_LOOK_S, self._look_at_all) if self.running else None


class Limit:
    """One block of code under a limit. Cancels its task when it runs out, and turns that into `TimeoutError`."""

    __slots__ = ("_has_run_out", "_limits", "_num_cancelled_before", "_task", "ends_s", "owner")

    def __init__(self, limits: TimeLimits, seconds: float, owner: Hashable) -> None:
        self._limits = limits
        self._task: asyncio.Task[object] | None = None
        self._has_run_out = False
        self._num_cancelled_before = 0
        self.ends_s = limits.clock.now_s() + seconds
        self.owner = owner

    def renew(self, seconds: float) -> None:
        """Count anew from now."""
        self.ends_s = self._limits.clock.now_s() + seconds

    def run_out(self) -> None:
        """Time is over."""
        if not self._has_run_out and self._task is not None:
            self._has_run_out = True
            self._task.cancel()

    def __enter__(self) -> "Limit":
        self._task = task = asyncio.current_task()
        if task is None:
            raise RuntimeError("limits are for tasks")
        self._num_cancelled_before = task.cancelling()
        self._limits.running.add(self)
        self._limits.keep_looking()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._limits.running.discard(self)
        if self._has_run_out and self._task is not None:
            # Ours to turn only if nobody else cancelled the task as well (as asyncio.timeout has it).
            is_ours = self._task.uncancel() <= self._num_cancelled_before
            if is_ours and exc_type is asyncio.CancelledError:
                raise TimeoutError from exc

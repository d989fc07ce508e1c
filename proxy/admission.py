"""The door: how many requests are served at once and how many may wait (journey row 2).

Owns: slots and the queue in front of them. Does not know: engines, bodies.
"""

import asyncio
from collections import deque
from types import TracebackType
from typing import Self

from common.errors import NotReady, QueueFull
from proxy.config import AdmissionConfig


class Admission:
    """First come, first served.

    Args:
        config: sizes and waiting time.
    """

    def __init__(self, config: AdmissionConfig) -> None:
        self._config = config
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._idle = asyncio.Event()
        self._idle.set()
        self._busy = asyncio.Event()
        self.num_running = 0
        self.is_closed = False

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return sum(not turn.done() for turn in self._waiting)

    def slot(self) -> "_Slot":
        """An async context manager that holds one slot.

        Entering raises:
            QueueFull: the queue is full, or the wait was too long.
            NotReady: the proxy takes no more requests.
        """
        return _Slot(self)

    async def acquire(self) -> None:
        """Take a slot, waiting in line if there is none."""
        if self.is_closed:
            raise NotReady("the proxy is shutting down", retry_after_s=1.0)
        if self.num_running < self._config.max_concurrent and not self._waiting:
            self.num_running += 1
            if self.num_running == 1:
                self._idle.clear()
                self._busy.set()
            return
        if self.num_waiting >= self._config.max_queued:
            raise QueueFull("too many requests are waiting", retry_after_s=1.0)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(self._config.queue_timeout_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self.release()  # the slot was handed over in the very moment of giving up
            elif turn in self._waiting:
                self._waiting.remove(turn)
            if isinstance(error, TimeoutError):
                raise QueueFull("waited too long for a free slot", retry_after_s=2.0) from error
            raise

    def release(self) -> None:
        """Give a slot back: to the next in line, if any."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.num_running -= 1
        if self.num_running == 0:
            self._idle.set()
            self._busy.clear()

    def close(self) -> None:
        """Let nobody else in; those inside and in line stay."""
        self.is_closed = True

    async def wait_busy(self) -> None:
        """Return when some request holds a slot."""
        await self._busy.wait()

    async def wait_idle(self) -> None:
        """Return when no request holds a slot."""
        await self._idle.wait()


class _Slot:
    """One slot, held while the block runs."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    async def __aenter__(self) -> Self:
        await self._admission.acquire()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._admission.release()

"""Background work that outlives a request, and the signals that end a process.

Owns: the supervisor (nothing is spawned outside a group; a failed task is logged, never lost) and signal waiting.
Does not know: what the tasks do.
"""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterable
from types import TracebackType
from typing import Any, Self

import structlog

_log = structlog.get_logger(__name__)


class Supervisor:
    """A task group whose members may fail without taking the others down; leaving it cancels what still runs.

    Args:
        grace_s: how long leaving waits for the tasks that `spawn`ed with `finish=True`.
    """

    def __init__(self, grace_s: float = 2.0) -> None:
        self._grace_s = grace_s
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()
        self._to_finish: set[asyncio.Task[None]] = set()

    @property
    def num_tasks(self) -> int:
        """Tasks that have not ended."""
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str, finish: bool = False) -> asyncio.Task[None]:
        """Run `work` beside everything else; `finish` asks for a grace period at the end."""
        task = self._group.create_task(_guarded(work, name), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if finish:
            self._to_finish.add(task)
            task.add_done_callback(self._to_finish.discard)
        return task

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._to_finish and exc is None:
            await asyncio.wait(set(self._to_finish), timeout=self._grace_s)
        for task in list(self._tasks):
            task.cancel()
        # The caller's own failure stays what it is: the group, told nothing of it, only waits for its tasks.
        await self._group.__aexit__(None, None, None)


async def _guarded(work: Coroutine[Any, Any, None], name: str) -> None:
    try:
        await work
    except Exception as error:  # noqa: BLE001 - the supervisor is where background failures end, in the log
        _log.exception("task.failed", task=name, error=repr(error))


async def wait_for_signal(
    signals: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGINT),
    *,
    on_hangup: Callable[[], None] | None = None,
) -> signal.Signals:
    """Sleep until one of `signals` arrives; SIGHUP runs `on_hangup` meanwhile. Main thread only."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[signal.Signals] = loop.create_future()

    def remember(number: signal.Signals) -> None:
        """The first signal counts."""
        if not arrived.done():
            arrived.set_result(number)

    watched = tuple(signals)
    for number in watched:
        loop.add_signal_handler(number, remember, number)
    if on_hangup is not None:
        loop.add_signal_handler(signal.SIGHUP, on_hangup)
    try:
        return await arrived
    finally:
        for number in (*watched, *((signal.SIGHUP,) if on_hangup is not None else ())):
            loop.remove_signal_handler(number)


def only_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The exception a task group failed with, for callers whose group holds one piece of work and its helper."""
    first = group.exceptions[0]
    return only_cause(first) if isinstance(first, BaseExceptionGroup) else first

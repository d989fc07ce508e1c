"""The three processes as one thing: up when all are ready, down when one of them dies.

Owns: waiting for readiness, noticing deaths. Does not know: the command line.
"""

import asyncio
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from common.clock import Clock
from common.errors import StartupError
from common.tasks import Supervisor
from proxy.up.children import Child, Report, stop_all
from proxy.up.plan import ChildPlan

PROBE_PAUSE_S = 0.2
PROBE_TIMEOUT_S = 2.0


class ChildDied(StartupError):
    """A process ended that should be running.

    Args:
        message: which, how, and its last words.
        exit_code: what we should exit with.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Trio:
    """The running processes."""

    def __init__(self, children: Sequence[Child]) -> None:
        self._children = children
        self._ended = asyncio.Event()
        self._dead: Child | None = None

    def url(self, name: str) -> str:
        """Base URL of the process called `name`."""
        return next(child.plan.url for child in self._children if child.plan.name == name)

    async def watch(self, child: Child) -> None:
        """Pass `child`'s lines on and remember when it ends."""
        await child.pump()
        self._dead = self._dead or child
        self._ended.set()

    async def wait_death(self) -> ChildDied:
        """Sleep until a process ends; how it did."""
        await self._ended.wait()
        return self._death()

    async def wait_ready(self, report: Report, clock: Clock) -> None:
        """Return when every process says it is ready.

        Raises:
            ChildDied: one ended instead.
        """
        started_s, waiting = clock.now_s(), list(self._children)
        while waiting:
            if self._dead is not None:
                raise self._death()
            for child in tuple(waiting):
                if await asyncio.to_thread(is_ready, child.plan.url):
                    waiting.remove(child)
                    done = len(self._children) - len(waiting)
                    took_s = clock.now_s() - started_s
                    report(f"  pd-up | {child.plan.name} is ready after {took_s:.1f} s ({done}/{len(self._children)})")
            if waiting:
                await asyncio.sleep(PROBE_PAUSE_S)

    def _death(self) -> ChildDied:
        dead = self._dead
        if dead is None:
            return ChildDied("a process ended", 1)
        return ChildDied(dead.epitaph(), 2 if dead.exit_code == 2 else 1)


def is_ready(url: str) -> bool:
    """Whether `/ready` answers 200. Blocks for `PROBE_TIMEOUT_S` at most."""
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=PROBE_TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError, ValueError):
        return False


@asynccontextmanager
async def running_trio(plans: Sequence[ChildPlan], report: Report, clock: Clock) -> AsyncIterator[Trio]:
    """All processes, ready; stopped when the block ends.

    Raises:
        ChildDied: one ended before all were ready.
        StartupError: one cannot be started.
    """
    children: list[Child] = []
    async with Supervisor() as background:
        try:
            for plan in plans:
                children.append(await Child.start(plan, report))  # noqa: PERF401 - those started so far must be stopped
            trio = Trio(children)
            for child in children:
                background.spawn(trio.watch(child), name=f"watch-{child.plan.name}", finish=True)
            await trio.wait_ready(report, clock)
            yield trio
        finally:
            await stop_all(children)

"""Child processes: started, their lines passed on with a name in front, watched, stopped.

Owns: one process each, and the group of them. Does not know: what they are, when they are ready.
"""

import asyncio
import signal
from collections import deque
from collections.abc import Callable, Sequence

from common.errors import StartupError
from proxy.up.plan import ChildPlan

Report = Callable[[str], None]
"""Takes one line of output."""

LAST_LINES = 20
STOP_WITHIN_S = 45.0
"""Longer than any drain of the default config; then SIGKILL."""


class Child:
    """One running process.

    Args:
        plan: what it is.
        process: with both outputs in one pipe.
        report: takes its lines.
    """

    def __init__(self, plan: ChildPlan, process: asyncio.subprocess.Process, report: Report) -> None:
        self.plan = plan
        self._process = process
        self._report = report
        self._last: deque[str] = deque(maxlen=LAST_LINES)

    @classmethod
    async def start(cls, plan: ChildPlan, report: Report) -> "Child":
        """Start it in a session of its own, so that Ctrl-C reaches it through us, in order.

        Raises:
            StartupError: the program cannot be run.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *plan.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise StartupError(f"{plan.name} cannot be started: {error}") from error
        return cls(plan, process, report)

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self._process.returncode

    async def pump(self) -> None:
        """Pass its lines on until it has ended."""
        output = self._process.stdout
        if output is not None:
            async for line in output:
                text = line.decode(errors="replace").rstrip()
                self._last.append(text)
                self._report(f"{self.plan.name:>7} | {text}")
        await self._process.wait()

    def epitaph(self) -> str:
        """How it ended and the last thing it said."""
        code = self.exit_code
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"status {code}"
        last = self._last[-1] if self._last else "it said nothing"
        return f"{self.plan.name} ended with {how}: {last}"

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL when it does not end in time. Idempotent."""
        if self.exit_code is not None:
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(STOP_WITHIN_S):
                await self._process.wait()
        except TimeoutError:
            self._report(f"{self.plan.name:>7} | did not stop in {STOP_WITHIN_S:.0f} s; killed")
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        """SIGKILL."""
        if self.exit_code is None:
            self._process.kill()


async def stop_all(children: Sequence[Child]) -> None:
    """Stop the last started first, one after the other; killing all of them when cancelled meanwhile."""
    try:
        for child in reversed(children):
            await child.stop()
    finally:
        for child in children:
            child.kill()

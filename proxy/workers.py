"""`--workers N`: N processes share the port; the kernel spreads connections over them (SO_REUSEPORT).

Owns: starting them, starting a lost one again, ending all of them together. Does not know: what they serve.
"""

import asyncio
import signal
import sys
import tempfile
from pathlib import Path

import structlog

from common.tasks import only_cause, wait_for_signal
from proxy.shared_metrics import file_of, set_aside

_log = structlog.get_logger(__name__)
_COULD_NOT_START = (1, 2)
_PAUSE_S = 0.5


class WorkerFailed(Exception):
    """A worker could not start; starting it again would not help."""

    def __init__(self, status: int) -> None:
        super().__init__(f"a worker could not start: status {status}")
        self.status = status


async def run_workers(config_path: str, num_workers: int) -> int:
    """Run `num_workers` proxies until a signal; the exit status."""
    children: dict[int, asyncio.subprocess.Process] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="pd-proxy-") as folder:
            await _run_in(Path(folder), config_path, num_workers, children)
    except BaseExceptionGroup as errors:
        cause = only_cause(errors)
        if not isinstance(cause, WorkerFailed):
            raise
        return cause.status
    return 0


async def _run_in(
    folder: Path, config_path: str, num_workers: int, children: dict[int, asyncio.subprocess.Process]
) -> None:
    async with asyncio.TaskGroup() as group:
        keepers = [group.create_task(_keep(number, config_path, folder, children)) for number in range(num_workers)]
        await wait_for_signal(on_hangup=lambda: _send(children, signal.SIGHUP))
        for keeper in keepers:
            keeper.cancel()


async def _keep(number: int, config_path: str, folder: Path, children: dict[int, asyncio.subprocess.Process]) -> None:
    command = [sys.executable, "-m", "proxy", "--config", config_path]
    command += ["--shared-file", str(file_of(folder, number))]
    while True:
        # Children live in sessions of their own: Ctrl-C reaches the parent alone, which passes it on.
        child = await asyncio.create_subprocess_exec(*command, start_new_session=True)
        children[number] = child
        try:
            status = await child.wait()
        except asyncio.CancelledError:
            child.terminate()
            await child.wait()
            raise
        _log.error("worker.lost", worker=number, status=status)
        set_aside(folder, number)
        if status in _COULD_NOT_START:
            raise WorkerFailed(status)
        await asyncio.sleep(_PAUSE_S)


def _send(children: dict[int, asyncio.subprocess.Process], number: signal.Signals) -> None:
    for child in children.values():
        if child.returncode is None:
            child.send_signal(number)

"""Servers, and pausing those that are not being measured.

Owns: SIGSTOP and SIGCONT, to a server's processes and all their descendants.
"""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_EFFECT_S = 1.0


@dataclass(frozen=True, slots=True)
class Target:
    """A server and the processes to pause, with their descendants, while others are measured."""

    name: str
    url: str
    pids: tuple[int, ...]


@contextmanager
def others_paused(target: Target | None, targets: Sequence[Target]) -> Iterator[None]:
    """All processes of `targets` stand still but those of `target`, if any; two targets may share processes."""
    running = with_descendants(set(target.pids)) if target else set()
    paused = with_descendants({pid for other in targets for pid in other.pids}) - running
    _send(paused, signal.SIGSTOP)
    _wait_until(paused, are_stopped=True)
    try:
        yield
    finally:
        _send(paused, signal.SIGCONT)
        _wait_until(paused, are_stopped=False)


def with_descendants(pids: set[int]) -> set[int]:
    """These processes, their children, the children's children, as they are now."""
    found, unseen = set(pids), list(pids)
    while unseen:
        for tasks in Path(f"/proc/{unseen.pop()}/task").glob("*/children"):
            try:
                children = {int(pid) for pid in tasks.read_text().split()}
            except OSError:  # it ended meanwhile
                continue
            unseen.extend(children - found)
            found |= children
    return found


def _wait_until(pids: set[int], *, are_stopped: bool) -> None:
    """A signal takes effect when its process next gets a core; wait for all, a second at most."""
    until_s = time.monotonic() + _EFFECT_S
    while any(_is_stopped(pid) not in (are_stopped, None) for pid in pids) and time.monotonic() < until_s:
        time.sleep(0.001)


def _is_stopped(pid: int) -> bool | None:
    """None: it has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return None
    return None if state == "Z" else state in "Tt"


def _send(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:  # a short-lived child
            continue

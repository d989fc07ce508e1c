"""Idle is idle: with no request the three processes together leave the cores alone."""

import time

import psutil
import pytest

from tests.support.trio import Trio, post_json

pytestmark = pytest.mark.slow

WINDOW_S = 8.0


def cpu_s(trio: Trio) -> float:
    """CPU seconds of the three processes and their children."""
    total = 0.0
    for process in trio.processes.values():
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        total += sum(sum(member.cpu_times()[:2]) for member in family)
    return total


def test_three_idle_processes_use_under_five_percent_of_a_core(trio: Trio) -> None:
    # One request first, so that connections, agents and leases have existed.
    body = {"model": "smollm2", "prompt": "hello", "max_tokens": 2}
    assert post_json(trio.url("proxy") + "/v1/completions", body)[0] == 200
    time.sleep(2.0)  # the window measured must lie after the request's last work; there is no event for "quiet"
    before, start = cpu_s(trio), time.monotonic()
    time.sleep(WINDOW_S)  # the window itself
    used = (cpu_s(trio) - before) / (time.monotonic() - start)
    assert used < 0.05, f"{used:.1%} of a core"

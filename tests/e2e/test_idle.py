"""Idle is idle: with no request the three processes together leave the cores alone.

Counted in wake-ups, not in CPU time: what one costs depends on the machine (caches, a host that takes idle memory
back), how often we wake does not. A progress thread or a poll without rest wakes thousands of times a second or never
sleeps.
"""

import time

import psutil
import pytest

from tests.support.trio import Trio, post_json

pytestmark = pytest.mark.slow

WINDOW_S = 8.0
MAX_WAKE_UPS_PER_S = 150.0
SPINNING = 0.5


def members(trio: Trio) -> list[psutil.Process]:
    """The three processes and their children."""
    families = [psutil.Process(process.pid) for process in trio.processes.values()]
    return [*families, *(child for family in families for child in family.children(recursive=True))]


def used(trio: Trio) -> tuple[float, float]:
    """(wake-ups, CPU seconds) so far."""
    family = members(trio)
    wake_ups = 0.0
    for member in family:
        for thread in member.threads():
            wake_ups += psutil.Process(thread.id).num_ctx_switches().voluntary
    return wake_ups, sum(sum(member.cpu_times()[:2]) for member in family)


def test_three_idle_processes_wake_up_seldom_and_never_spin(trio: Trio) -> None:
    # One request first, so that connections, agents and leases have existed.
    body = {"model": "smollm2", "prompt": "hello", "max_tokens": 2}
    assert post_json(trio.url("proxy") + "/v1/completions", body)[0] == 200
    time.sleep(4.0)  # the window measured must lie after the request's last work; there is no event for "quiet"
    before, start = used(trio), time.monotonic()
    time.sleep(WINDOW_S)  # the window itself
    after, window_s = used(trio), time.monotonic() - start
    assert (after[0] - before[0]) / window_s < MAX_WAKE_UPS_PER_S
    assert (after[1] - before[1]) / window_s < SPINNING

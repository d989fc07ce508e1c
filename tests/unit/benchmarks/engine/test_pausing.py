import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.engine.pausing import Target, others_paused, with_descendants

PARENT = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'input()']).pid, flush=True); input()"


@pytest.fixture
def families() -> Iterator[list[tuple[subprocess.Popen[bytes], int]]]:
    started = []
    for _ in range(2):
        parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert parent.stdout is not None
        started.append((parent, int(parent.stdout.readline())))
    yield started
    for parent, _ in started:
        parent.communicate(b"\n\n")


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def test_whoever_is_not_measured_stands_still_with_its_children(
    families: list[tuple[subprocess.Popen[bytes], int]],
) -> None:
    (mine, my_child), (other, other_child) = families
    target = Target("mine", "", (mine.pid,))
    with others_paused(target, [target, Target("other", "", (other.pid,)), Target("same", "", (mine.pid,))]):
        assert [state_of(pid) for pid in (other.pid, other_child)] == ["T", "T"]
        assert "T" not in [state_of(pid) for pid in (mine.pid, my_child)]
    assert "T" not in [state_of(pid) for pid in (other.pid, other_child)]


def test_a_process_that_is_gone_has_no_descendants() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert with_descendants({gone.pid}) == {gone.pid}

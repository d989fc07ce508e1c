import os
import time
from pathlib import Path

import pytest
import torch

from common.engine.model.cpu_kernels.library import available
from common.engine.model.cpu_kernels.packed import PackedFormat, PackedLinear
from common.engine.model.cpu_kernels.threads import Threads, default_num_threads

needs_kernels = pytest.mark.skipif(not available(), reason="the kernels cannot be built here")


def test_hyperthreads_of_one_core_count_once(tmp_path: Path) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    file = tmp_path / "cpuinfo"
    file.write_text("\n\n".join(f"processor\t: {cpu}\nphysical id\t: 0\ncore id\t: 7" for cpu in allowed))
    assert default_num_threads(file) == 1


def test_without_topology_each_allowed_processor_is_a_core(tmp_path: Path) -> None:
    assert default_num_threads(tmp_path / "absent") == len(os.sched_getaffinity(0))


@needs_kernels
def test_threads_cost_nothing_between_calls() -> None:
    linear = PackedLinear(torch.ones(64, 32), None, (PackedFormat.FLOAT32,), Threads(3))
    linear(torch.ones(1, 32))
    before_s = time.process_time()
    time.sleep(0.3)  # the subject: a spinning thread would use all of it
    assert time.process_time() - before_s < 0.15


@needs_kernels
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")  # the subject
def test_a_forked_process_can_let_go_of_threads_it_does_not_have() -> None:
    threads = Threads(3)
    child = os.fork()
    if child == 0:
        threads.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

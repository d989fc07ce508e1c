"""What this machine can do: bytes read per second, multiplications per second.

Owns: the two probes. Each call is one sample; the caller takes them in turns with what it holds against them.
"""

import time
from collections.abc import Callable
from pathlib import Path

import torch

from common.engine.model.cpu_kernels.library import load_library
from common.engine.model.cpu_kernels.threads import Threads

# m, k, n of the largest matrix of a layer of the default model at its usual prefill.
GEMM_SHAPE = (512, 576, 3072)
# torch's threads spin for some milliseconds after their work; what is measured next must not share cores with them.
SETTLE_S = 0.02


class Machine:
    """Probes with `num_threads` threads.

    Args:
        num_threads: of the probes and of the forwards held against them.
        clock_s: what times them: `time.perf_counter`, or `time.thread_time` (one thread only) on a machine that others
            use, where wall time says more about them.
    """

    def __init__(self, num_threads: int, clock_s: Callable[[], float]) -> None:
        self.num_threads = num_threads
        self.clock_s = clock_s
        self.name = _cpu_name()
        self.threads = Threads(num_threads)
        self._buffer = torch.zeros(0, dtype=torch.uint8)
        self._operands: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}

    def read_bytes_per_s(self, num_bytes: int) -> float:
        """One read of that many bytes, right after another: a cache that holds them will hold weights too."""
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(num_bytes + (4 << 20), dtype=torch.uint8)
            load_library().pd_advise_huge(self._buffer.data_ptr(), self._buffer.numel())
            self._buffer.fill_(0)
        load_library().pd_read(self.threads.handle, self._buffer.data_ptr(), num_bytes)
        start_s = self.clock_s()
        load_library().pd_read(self.threads.handle, self._buffer.data_ptr(), num_bytes)
        return num_bytes / (self.clock_s() - start_s)

    def flops_per_s(self, dtype: torch.dtype) -> float:
        """Rate of torch's matrix multiplication at `GEMM_SHAPE`: the better of three."""
        m, k, n = GEMM_SHAPE
        a, b = self._operands.setdefault(dtype, (torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)))
        before = torch.get_num_threads()
        torch.set_num_threads(self.num_threads)
        best_s = min(self._multiplied_s(a, b) for _ in range(3))
        torch.set_num_threads(before)
        time.sleep(SETTLE_S)
        return 2 * m * k * n / best_s

    def _multiplied_s(self, a: torch.Tensor, b: torch.Tensor) -> float:
        start_s = self.clock_s()
        torch.mm(a, b)
        return self.clock_s() - start_s


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")

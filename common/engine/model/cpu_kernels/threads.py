"""The threads the kernels run on: a pool that spins only inside a call and sleeps between calls.

Owns: a pool's life and the default size. Does not know what runs on it.
"""

import ctypes
import os
import weakref
from pathlib import Path

from common.engine.model.cpu_kernels.library import load_library


class Threads:
    """`num_threads` including the caller; ended by `close` or with the object.

    Raises:
        CannotBuild: there is no library.
    """

    def __init__(self, num_threads: int) -> None:
        library = load_library()
        self.num_threads = max(1, num_threads)
        self.handle = ctypes.c_void_p(library.pd_threads_new(self.num_threads))
        self._free = weakref.finalize(self, library.pd_threads_free, self.handle)

    def close(self) -> None:
        """End the threads now; the object is of no use afterwards."""
        self._free()


def default_num_threads(cpuinfo: Path = Path("/proc/cpuinfo")) -> int:
    """Physical cores this process may use: a second thread on the same core adds no memory bandwidth."""
    allowed = os.sched_getaffinity(0)
    try:
        text = cpuinfo.read_text()
    except OSError:
        return len(allowed)
    cores: set[tuple[str, str]] = set()
    for paragraph in text.strip().split("\n\n"):
        fields = {
            key.strip(): value.strip() for key, _, value in (line.partition(":") for line in paragraph.split("\n"))
        }
        if fields.get("processor", "").isdecimal() and int(fields["processor"]) in allowed:
            cores.add((fields.get("physical id", "0"), fields.get("core id", fields["processor"])))
    return len(cores) or len(allowed)

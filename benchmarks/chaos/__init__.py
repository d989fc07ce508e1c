"""`pd-bench chaos`: random faults under load; every answered request must equal the fault-free run's.

Owns: the fleet of processes, the faults, the clients, the verdict.
"""

from benchmarks.chaos.command import add_arguments, run

__all__ = ["add_arguments", "run"]

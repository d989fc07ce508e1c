"""`pd-bench engine`: TTFT, TPOT and throughput of OpenAI servers, interleaved in one run.

Owns: the measures, the pausing of targets that are not being measured, the table.
"""

from benchmarks.engine.command import add_arguments, run

__all__ = ["add_arguments", "run"]

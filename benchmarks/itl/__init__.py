"""`pd-bench itl`: what slow masks and hostile constraints cost the free streams beside them.

Owns: the phases, the streams and their gaps, the report.
"""

from benchmarks.itl.command import add_arguments, run

__all__ = ["add_arguments", "run"]

"""`pd-bench ttft`: structured against free, interleaved in one run, against any OpenAI URL.

Owns: the plan of cells, the measuring client, statistics, the table and the page.
"""

from benchmarks.ttft.command import add_arguments, run

__all__ = ["add_arguments", "run"]

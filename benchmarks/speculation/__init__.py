"""`pd-bench speculation`: time per output token with and without guesses, by kind of text.

Owns: the texts, the measurement, the report.
"""

from benchmarks.speculation.command import add_arguments, run

__all__ = ["add_arguments", "run"]

"""`pd-bench grammar`: time to a grammar's first mask, what each backend enforces, and whether real answers are valid.

Each line of the sample holds `schema` and `tests` (`data`, `valid`). Owns: the runs over it and their tables.
"""

from benchmarks.grammar.command import add_arguments, run

__all__ = ["add_arguments", "run"]

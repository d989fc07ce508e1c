"""Limits of a compilation in the words of an answer.

Owns: the refusal that must never be cached, and its texts. Does not know how limits are kept.
"""

from common.config.engine import GrammarConfig
from common.engine.structured_output.probe_wire import ProbeReport, ProbeVerdict
from common.errors import ConstraintRejected
from common.wire.constraint import Constraint


class LimitPassed(ConstraintRejected):
    """The compilation passed a limit, or its process died: with more room, or another day, it may work."""


def probe_error(report: ProbeReport, constraint: Constraint, config: GrammarConfig) -> ConstraintRejected:
    """Why a probe that did not compile `constraint` refuses it; names the limit and the constraint."""
    what = f"this {constraint.kind.value} constraint ({len(constraint.value)} characters)"
    if report.verdict is ProbeVerdict.REJECTED:
        return ConstraintRejected(report.reason, constraint.field)
    if report.verdict is ProbeVerdict.TIMED_OUT:
        detail = f": {report.reason}" if report.reason else ""
        limit = f"compile_timeout_s = {config.compile_timeout_s:g}"
        return LimitPassed(f"{what} cannot be compiled within the limit {limit}{detail}", constraint.field)
    limit = f"compile_memory_bytes = {config.compile_memory_bytes}"
    if report.verdict is ProbeVerdict.OUT_OF_MEMORY:
        return LimitPassed(f"{what} cannot be compiled within the limit {limit}", constraint.field)
    cause = report.reason or f"perhaps on the limit {limit}"
    return LimitPassed(f"the compiler crashed on {what}: {cause}", constraint.field)

"""One span of a trace. Owns: its fields. Does not know: how spans are made or sent."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from common.tracing.context import TraceContext

Value = str | int | float | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One span; times in seconds of its process's monotonic clock."""

    context: TraceContext
    span_id: str
    parent_id: str | None
    name: str
    start_s: float
    end_s: float
    is_server: bool = False
    is_error: bool = False
    attributes: Mapping[str, Value] = field(default_factory=dict)

"""W3C trace context: which trace a request belongs to, and who is its parent in it.

Owns: reading and writing `traceparent`. Source: W3C Trace Context, level 1.
"""

import re
import secrets
from dataclasses import dataclass
from random import Random

HEADER = "traceparent"
_VALID = re.compile(r"^(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """Where a request stands in its trace.

    Attributes:
        trace_id: 32 hex digits, the caller's or new.
        span_id: 16 hex digits, of the request's own span.
        parent_id: of the caller's span; None where there is no caller that traces.
        is_sampled: whether the trace is kept.
    """

    trace_id: str
    span_id: str
    parent_id: str | None
    is_sampled: bool

    @property
    def traceparent(self) -> str:
        """What the legs carry: the request's span is their parent."""
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.is_sampled else '00'}"


def begin(traceparent: str | None, sample_ratio: float, random: Random) -> TraceContext:
    """The context of a new request; the caller's decision to sample is kept, without one `sample_ratio` decides."""
    found = _VALID.match(traceparent or "")
    if found is None or found["version"] == "ff" or int(found["trace"], 16) == 0 or int(found["span"], 16) == 0:
        is_sampled = random.random() < sample_ratio
        return TraceContext(
            trace_id=secrets.token_hex(16), span_id=new_span_id(), parent_id=None, is_sampled=is_sampled
        )
    return TraceContext(
        trace_id=found["trace"],
        span_id=new_span_id(),
        parent_id=found["span"],
        is_sampled=bool(int(found["flags"], 16) & 1),
    )


def new_span_id() -> str:
    """16 hex digits, not all zero for all practical purposes."""
    return secrets.token_hex(8)

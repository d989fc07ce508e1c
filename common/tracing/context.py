"""W3C trace context: which trace a request belongs to, and who is its parent in it.

Owns: reading and writing `traceparent`. Source: W3C Trace Context, level 1.
"""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

HEADER = "traceparent"
ANSWER_HEADER = "traceresponse"
"""An engine that traces a request says so by its own span (W3C Trace Context, level 2)."""
LEGS = ("prefill", "decode")
_VALID = re.compile(r"^(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """Where a request stands in its trace.

    Attributes:
        trace_id: 32 hex digits, the caller's or new.
        span_id: 16 hex digits, of the request's own span.
        parent_id: of the caller's span; None where there is no caller that traces.
        is_sampled: whether the trace is kept.
        leg_span_ids: of the legs' spans, under which the engines' own belong.
    """

    trace_id: str
    span_id: str
    parent_id: str | None
    is_sampled: bool
    leg_span_ids: Mapping[str, str] = field(default_factory=lambda: {leg: new_span_id() for leg in LEGS})

    @property
    def traceparent(self) -> str:
        """What others are told: the request's span is their parent."""
        return self._naming(self.span_id)

    def traceparent_of(self, leg: str) -> str:
        """What a leg carries: its span is the engine's parent."""
        return self._naming(self.leg_span_ids[leg])

    def _naming(self, span_id: str) -> str:
        return f"00-{self.trace_id}-{span_id}-{'01' if self.is_sampled else '00'}"


def follow(traceparent: str | None) -> TraceContext | None:
    """The context of a request whose caller keeps its trace; None where it does not, or there is no such caller."""
    context = begin(traceparent, 0.0, Random(0))
    return context if context.is_sampled else None


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

from random import Random

import pytest

from common.clock import ManualClock
from common.tracing.context import TraceContext, begin, follow
from common.tracing.exporter import TraceExporter
from common.tracing.span import Span

TRACE, PARENT = "a" * 32, "b" * 16


class Silent:
    async def post(self, body: bytes) -> int:
        return 200

    def close(self) -> None:
        pass


def context() -> TraceContext:
    return begin(f"00-{TRACE}-{PARENT}-01", 0.0, Random(0))


def test_the_callers_trace_and_decision_are_kept() -> None:
    kept = context()
    assert (kept.trace_id, kept.parent_id, kept.is_sampled) == (TRACE, PARENT, True)
    assert kept.traceparent == f"00-{TRACE}-{kept.span_id}-01"
    assert not begin(f"00-{TRACE}-{PARENT}-00", 1.0, Random(0)).is_sampled
    assert begin(f"01-{TRACE}-{PARENT}-03-future", 0.0, Random(0)).trace_id == TRACE


@pytest.mark.parametrize("header", [None, "", "nonsense", f"ff-{TRACE}-{PARENT}-01", f"00-{'0' * 32}-{PARENT}-01"])
def test_without_a_valid_caller_a_trace_begins_here(header: str | None) -> None:
    new = begin(header, 1.0, Random(0))
    assert new.parent_id is None
    assert new.trace_id != TRACE
    assert new.is_sampled
    assert not begin(header, 0.0, Random(0)).is_sampled


def test_a_full_queue_drops_the_oldest_and_counts_them() -> None:
    exporter = TraceExporter(Silent(), "x", ManualClock())
    span = Span(context=context(), span_id="c" * 16, parent_id=None, name="x", start_s=0, end_s=1)
    exporter.add([span] * 8200)
    assert exporter.num_dropped == 8


@pytest.mark.parametrize("header", [None, "nonsense", f"00-{TRACE}-{PARENT}-00"])
def test_only_a_trace_that_the_caller_keeps_is_followed(header: str | None) -> None:
    assert follow(header) is None
    followed = follow(f"00-{TRACE}-{PARENT}-01")
    assert followed is not None
    assert (followed.trace_id, followed.parent_id) == (TRACE, PARENT)


def test_a_leg_names_its_own_span_as_the_parent() -> None:
    traced = context()
    legs = {traced.traceparent_of("prefill"), traced.traceparent_of("decode"), traced.traceparent}
    assert len(legs) == 3
    assert traced.traceparent_of("decode") == f"00-{TRACE}-{traced.leg_span_ids['decode']}-01"

from random import Random

from common.clock import ManualClock
from common.tracing.context import TraceContext, begin
from proxy.phase import PhaseTrack, ProxyPhase
from proxy.tracing.spans import journey_spans

TRACE, PARENT = "a" * 32, "b" * 16


def context() -> TraceContext:
    return begin(f"00-{TRACE}-{PARENT}-01", 0.0, Random(0))


def finished(*steps: tuple[ProxyPhase, float]) -> PhaseTrack:
    clock = ManualClock(10.0)
    track = PhaseTrack(clock, clock.now_s())
    for phase, seconds in steps:
        clock.advance(seconds)
        track.move_to(phase)
    return track


def test_stages_lie_inside_their_leg_and_legs_inside_the_request() -> None:
    track = finished(
        (ProxyPhase.ROUTED, 0),
        (ProxyPhase.PREFILLING, 1),
        (ProxyPhase.HANDED_OFF, 4),
        (ProxyPhase.STREAMING, 5),
        (ProxyPhase.DONE, 20),
    )
    spans = journey_spans(context(), "POST /x", track, ({"queue": 1.0, "compute": 2.0}, {"pull": 10.0}), {"a": 1})
    by_name = {span.name: span for span in spans}
    assert set(by_name) == {"POST /x", "prefill", "prefill.queue", "prefill.compute", "decode", "decode.pull"}
    root, prefill, decode = by_name["POST /x"], by_name["prefill"], by_name["decode"]
    assert (root.start_s, root.end_s, root.parent_id) == (10, 40, PARENT)
    assert (prefill.start_s, prefill.end_s, decode.start_s, decode.end_s) == (11, 15, 15, 40)
    assert (by_name["prefill.queue"].start_s, by_name["prefill.compute"].end_s) == (11.5, 14.5)
    assert (by_name["decode.pull"].start_s, by_name["decode.pull"].end_s) == (15, 20)  # a report too long is shrunk
    assert prefill.parent_id == decode.parent_id == root.span_id
    assert by_name["decode.pull"].parent_id == decode.span_id


def test_a_journey_that_ended_early_has_the_spans_it_got_to() -> None:
    track = finished((ProxyPhase.ROUTED, 0), (ProxyPhase.PREFILLING, 1), (ProxyPhase.FAILED, 1))
    spans = journey_spans(context(), "POST /x", track, ({}, {}), {})
    assert [span.name for span in spans] == ["POST /x", "prefill"]
    assert spans[0].is_error

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.clock import ManualClock
from common.telemetry.timeline import Event, Timeline, stages_s

ORDER = (
    Event.ADMITTED,
    Event.GRAMMAR_READY,
    Event.PULL_STARTED,
    Event.PULL_DONE,
    Event.SCHEDULED,
    Event.FIRST_TOKEN,
    Event.HANDED_OFF,
    Event.ANSWERED,
)


def test_only_the_first_time_of_an_event_counts() -> None:
    clock = ManualClock()
    timeline = Timeline(clock)
    timeline.mark(Event.RECEIVED)
    clock.advance(1.0)
    timeline.mark(Event.SCHEDULED)
    clock.advance(1.0)
    timeline.mark(Event.SCHEDULED)
    assert timeline.between_s(Event.RECEIVED, Event.SCHEDULED) == 1.0
    assert timeline.between_s(Event.RECEIVED, Event.FIRST_TOKEN) is None


@given(st.lists(st.tuples(st.sampled_from(ORDER), st.floats(min_value=0, max_value=10)), max_size=12))
def test_stages_add_up_to_the_whole_whatever_happened_in_whatever_order(
    moves: list[tuple[Event, float]],
) -> None:
    clock = ManualClock()
    timeline = Timeline(clock)
    timeline.mark(Event.RECEIVED)
    for event, pause_s in moves:
        clock.advance(pause_s)
        timeline.mark(event)
    last_s = max((timeline.at_s[event] for event, _ in moves), default=0.0)
    stages = stages_s(timeline)
    assert sum(stages.values()) == pytest.approx(last_s, abs=1e-9)
    assert all(duration >= 0 for duration in stages.values())


def test_a_stage_that_did_not_happen_leaves_its_time_to_the_next() -> None:
    clock = ManualClock()
    timeline = Timeline(clock)
    timeline.mark(Event.RECEIVED)
    for event in (Event.ADMITTED, Event.SCHEDULED, Event.FIRST_TOKEN):
        clock.advance(1.0)
        timeline.mark(event)
    assert stages_s(timeline) == {"front": 1.0, "schedule": 1.0, "compute": 1.0}


def test_nothing_is_reported_before_a_request_was_received() -> None:
    assert stages_s(Timeline(ManualClock())) == {}

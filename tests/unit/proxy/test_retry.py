import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UpstreamBroken, UpstreamError, UpstreamTimeout, UpstreamUnreachable
from proxy.retry import Decision, Failure, Leg, Situation, counts_against_engine, decide, failure_of, failure_of_status

ANY = st.builds(
    Situation,
    num_tries_left=st.integers(0, 3),
    has_other_engine=st.booleans(),
    has_time=st.booleans(),
    may_skip_prefill=st.booleans(),
)
LEGS, FAILURES = st.sampled_from(Leg), st.sampled_from(Failure)
BEST = Situation(num_tries_left=1, has_other_engine=True, has_time=True, may_skip_prefill=True)
ALONE = Situation(num_tries_left=1, has_other_engine=False, has_time=True, may_skip_prefill=True)
LAST = Situation(num_tries_left=0, has_other_engine=True, has_time=True, may_skip_prefill=True)
STRICT = Situation(num_tries_left=1, has_other_engine=False, has_time=True, may_skip_prefill=False)


@given(LEGS, ANY)
def test_a_refused_request_is_never_tried_anywhere_else(leg: Leg, situation: Situation) -> None:
    assert decide(leg, Failure.REFUSED, situation) is Decision.ANSWER


@given(LEGS, FAILURES, ANY)
def test_nothing_is_tried_after_the_deadline_or_beyond_the_budget(
    leg: Leg, failure: Failure, situation: Situation
) -> None:
    decision = decide(leg, failure, situation)
    if not situation.has_time:
        assert decision is Decision.ANSWER
    if situation.num_tries_left == 0:
        assert decision not in (Decision.OTHER_ENGINE, Decision.SAME_ENGINE)
    if decision is Decision.OTHER_ENGINE:
        assert situation.has_other_engine
    if decision is Decision.WITHOUT_PREFILL:
        assert leg is Leg.PREFILL
        assert situation.may_skip_prefill


@pytest.mark.parametrize(
    ("leg", "failure", "situation", "decision"),
    [
        (Leg.PREFILL, Failure.UNREACHABLE, BEST, Decision.OTHER_ENGINE),
        (Leg.PREFILL, Failure.TIMEOUT, BEST, Decision.OTHER_ENGINE),
        (Leg.PREFILL, Failure.BROKEN, BEST, Decision.OTHER_ENGINE),
        (Leg.PREFILL, Failure.BUSY, BEST, Decision.OTHER_ENGINE),
        (Leg.PREFILL, Failure.UNAVAILABLE, BEST, Decision.OTHER_ENGINE),
        (Leg.PREFILL, Failure.SERVER_ERROR, BEST, Decision.OTHER_ENGINE),
        (Leg.PREFILL, Failure.UNREACHABLE, ALONE, Decision.WITHOUT_PREFILL),
        (Leg.PREFILL, Failure.TIMEOUT, ALONE, Decision.WITHOUT_PREFILL),
        (Leg.PREFILL, Failure.BROKEN, ALONE, Decision.SAME_ENGINE),
        (Leg.PREFILL, Failure.BUSY, ALONE, Decision.ANSWER),
        (Leg.PREFILL, Failure.UNAVAILABLE, ALONE, Decision.WITHOUT_PREFILL),
        (Leg.PREFILL, Failure.SERVER_ERROR, ALONE, Decision.WITHOUT_PREFILL),
        (Leg.PREFILL, Failure.BROKEN, LAST, Decision.WITHOUT_PREFILL),
        (Leg.PREFILL, Failure.SERVER_ERROR, STRICT, Decision.ANSWER),
        (Leg.DECODE, Failure.UNREACHABLE, BEST, Decision.OTHER_ENGINE),
        (Leg.DECODE, Failure.TIMEOUT, BEST, Decision.OTHER_ENGINE),
        (Leg.DECODE, Failure.BROKEN, BEST, Decision.OTHER_ENGINE),
        (Leg.DECODE, Failure.BUSY, BEST, Decision.OTHER_ENGINE),
        (Leg.DECODE, Failure.UNAVAILABLE, BEST, Decision.OTHER_ENGINE),
        (Leg.DECODE, Failure.SERVER_ERROR, BEST, Decision.OTHER_ENGINE),
        (Leg.DECODE, Failure.UNREACHABLE, ALONE, Decision.ANSWER),
        (Leg.DECODE, Failure.TIMEOUT, ALONE, Decision.ANSWER),
        (Leg.DECODE, Failure.BUSY, ALONE, Decision.ANSWER),
        (Leg.DECODE, Failure.UNAVAILABLE, ALONE, Decision.ANSWER),
        (Leg.DECODE, Failure.BROKEN, ALONE, Decision.SAME_ENGINE),
        (Leg.DECODE, Failure.SERVER_ERROR, ALONE, Decision.ANSWER),
        (Leg.DECODE, Failure.BROKEN, LAST, Decision.ANSWER),
    ],
)
def test_the_table_says_what_comes_next(leg: Leg, failure: Failure, situation: Situation, decision: Decision) -> None:
    assert decide(leg, failure, situation) is decision


@pytest.mark.parametrize(
    ("status", "failure"),
    [
        (200, None),
        (400, Failure.REFUSED),
        (401, Failure.REFUSED),
        (404, Failure.REFUSED),
        (408, Failure.BUSY),
        (422, Failure.REFUSED),
        (429, Failure.BUSY),
        (500, Failure.SERVER_ERROR),
        (501, Failure.SERVER_ERROR),
        (502, Failure.SERVER_ERROR),
        (503, Failure.UNAVAILABLE),
        (504, Failure.SERVER_ERROR),
    ],
)
def test_statuses_fall_into_classes(status: int, failure: Failure | None) -> None:
    assert failure_of_status(status) is failure


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (UpstreamUnreachable("x"), Failure.UNREACHABLE),
        (UpstreamTimeout("x"), Failure.TIMEOUT),
        (UpstreamBroken("x"), Failure.BROKEN),
    ],
)
def test_errors_fall_into_classes(error: UpstreamError, failure: Failure) -> None:
    assert failure_of(error) is failure


def test_neither_client_errors_nor_honest_overload_count_against_an_engine() -> None:
    counted = {failure for failure in Failure if counts_against_engine(failure)}
    assert counted == {Failure.UNREACHABLE, Failure.TIMEOUT, Failure.BROKEN, Failure.SERVER_ERROR}

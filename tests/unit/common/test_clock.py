import pytest

from common.clock import Deadline, ManualClock, SystemClock


def test_a_deadline_counts_down_and_never_below_zero() -> None:
    clock = ManualClock(100.0)
    deadline = Deadline.after(clock, 2.0)
    clock.advance(1.5)
    assert deadline.remaining_s() == pytest.approx(0.5)
    assert not deadline.has_passed()
    clock.advance(5.0)
    assert deadline.remaining_s() == 0.0
    assert deadline.has_passed()


def test_a_manual_clock_refuses_to_run_backwards() -> None:
    with pytest.raises(ValueError, match="backwards"):
        ManualClock().advance(-1.0)


def test_the_system_clock_does_not_run_backwards() -> None:
    clock = SystemClock()
    assert clock.now_s() <= clock.now_s()

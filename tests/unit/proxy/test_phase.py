import pytest

from common.clock import ManualClock
from common.errors import IllegalTransition
from proxy.phase import PHASES, PhaseTrack, ProxyPhase


def test_every_phase_can_fail_or_be_cancelled_until_it_is_over() -> None:
    for phase in ProxyPhase:
        if not PHASES.is_final(phase):
            assert {ProxyPhase.FAILED, ProxyPhase.CANCELLED} <= PHASES.targets(phase)


def test_nothing_is_sent_twice_once_bytes_reach_the_client() -> None:
    assert PHASES.targets(ProxyPhase.STREAMING) == {ProxyPhase.DONE, ProxyPhase.FAILED, ProxyPhase.CANCELLED}


def test_a_track_remembers_first_and_last_entry() -> None:
    clock = ManualClock()
    track = PhaseTrack(clock, clock.now_s())
    for phase in (ProxyPhase.ROUTED, ProxyPhase.PREFILLING, ProxyPhase.PREFILLING):
        clock.advance(1)
        track.move_to(phase)
    assert (track.first_s[ProxyPhase.PREFILLING], track.last_s[ProxyPhase.PREFILLING]) == (2, 3)
    with pytest.raises(IllegalTransition):
        track.move_to(ProxyPhase.DONE)

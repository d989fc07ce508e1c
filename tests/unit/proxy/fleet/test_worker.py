import pytest

from common.clock import ManualClock
from common.errors import IllegalTransition
from proxy.config import FleetConfig
from proxy.fleet.breaker import Breaker, BreakerState
from proxy.fleet.membership import Fleet
from proxy.fleet.worker import Role, Worker, WorkerState


def breaker(clock: ManualClock) -> Breaker:
    return Breaker(clock, max_failures=2, cooldown_s=5.0)


def worker() -> Worker:
    return Worker(Role.PREFILL, "http://p:1/", breaker(ManualClock()))


def test_failures_in_a_row_open_the_circuit_and_a_success_forgets_them() -> None:
    circuit = breaker(ManualClock())
    circuit.on_failure()
    circuit.on_success()
    circuit.on_failure()
    assert circuit.allows()
    circuit.on_failure()
    assert not circuit.allows()


def test_after_the_cooldown_one_leg_may_try() -> None:
    clock = ManualClock()
    circuit = breaker(clock)
    circuit.on_failure()
    circuit.on_failure()
    clock.advance(5)
    assert circuit.status is BreakerState.HALF_OPEN
    assert circuit.allows()
    circuit.on_sent()
    assert not circuit.allows()
    circuit.on_failure()
    assert circuit.status is BreakerState.OPEN
    clock.advance(5)
    circuit.on_sent()
    circuit.on_success()
    assert circuit.status is BreakerState.CLOSED


def test_a_trial_that_never_reports_does_not_lock_the_engine_out() -> None:
    clock = ManualClock()
    circuit = breaker(clock)
    circuit.on_failure()
    circuit.on_failure()
    clock.advance(5)
    circuit.on_sent()
    clock.advance(5)
    assert circuit.allows()


def test_one_failure_makes_suspect_until_a_success_or_a_good_probe_and_stays_counted() -> None:
    circuit = breaker(ManualClock())
    for clear in (circuit.on_success, circuit.on_probed):
        circuit.on_failure()
        assert (circuit.is_suspect, circuit.allows()) == (True, True)
        clear()
        assert not circuit.is_suspect
    circuit.on_failure()
    assert not circuit.allows()


def test_a_suspect_gets_legs_only_where_there_is_nobody_else() -> None:
    fleet = Fleet(FleetConfig(prefill=("http://p:1", "http://p:2")), ManualClock())
    first, second = fleet.all()
    for each in (first, second):
        each.move_to(WorkerState.READY)
    first.breaker.on_failure()
    assert fleet.routable(Role.PREFILL) == [second]
    assert fleet.routable(Role.PREFILL, [second]) == [first]
    second.breaker.on_failure()
    assert fleet.routable(Role.PREFILL) == [first, second]
    first.breaker.on_probed()
    assert fleet.routable(Role.PREFILL) == [first]


def test_a_worker_must_be_ready_before_it_can_die() -> None:
    subject = worker()
    with pytest.raises(IllegalTransition):
        subject.move_to(WorkerState.DEAD)
    subject.move_to(WorkerState.READY)
    assert subject.is_routable
    subject.move_to(WorkerState.DEAD)
    assert not subject.is_routable


def test_whoever_waits_for_a_worker_found_dead_is_told() -> None:
    dead: list[Worker] = []
    fleet = Fleet(FleetConfig(prefill=("http://p:1",)), ManualClock(), on_death=dead.append)
    (subject,) = fleet.all()
    subject.move_to(WorkerState.READY)
    assert dead == []
    subject.move_to(WorkerState.DEAD)
    assert dead == [subject]


def test_a_fleet_is_ready_with_one_of_each_role() -> None:
    config = FleetConfig(prefill=("http://p:1", "http://p:2"), decode=("http://d:1",))
    fleet = Fleet(config, ManualClock())
    assert fleet.is_starting(Role.PREFILL)
    fleet.add(Role.PREFILL, "http://p:1/").move_to(WorkerState.READY)
    assert not fleet.is_ready()
    fleet.add(Role.DECODE, "http://d:1").move_to(WorkerState.READY)
    assert fleet.is_ready()
    assert len(fleet.all()) == 3
    first = fleet.routable(Role.PREFILL)[0]
    assert fleet.routable(Role.PREFILL, excluded=[first]) == []
    fleet.remove(Role.DECODE, "http://d:1")
    assert not fleet.is_ready()

"""Leases end exactly once, whatever ends them."""

import itertools

import pytest

from common.clock import ManualClock
from common.errors import IllegalTransition, QueueFull
from common.ids import EngineId, LeaseId, RequestId
from kv_transfer.guard import GuardTable
from kv_transfer.interface import ReleaseCause
from kv_transfer.lease import LEASE_TRANSITIONS, REMEMBERED_CANCELS, Lease, LeaseBook, LeaseState

REQUEST = RequestId("r")


def a_book(num_slots: int = 4, ttl_s: float = 30.0) -> tuple[LeaseBook, GuardTable, ManualClock]:
    clock = ManualClock()
    guard = GuardTable(EngineId("P"), num_slots)
    return LeaseBook(guard, clock, ttl_s), guard, clock


def hold(book: LeaseBook, request_id: RequestId = REQUEST) -> LeaseId:
    return book.hold(request_id, lambda _: bytes(32))


def test_a_released_lease_is_drained_once_and_its_slot_is_free_again() -> None:
    book, guard, _ = a_book()
    name = hold(book)
    assert book.release(name, ReleaseCause.READ)
    assert not book.release(name, ReleaseCause.READ)
    assert book.drain_released() == (name,)
    assert book.drain_released() == ()
    assert guard.num_free == 4


def test_a_lease_expires_after_its_ttl_and_not_before() -> None:
    book, _, clock = a_book(ttl_s=30)
    name = hold(book)
    clock.advance(29.9)
    assert book.expire() == 0
    clock.advance(0.1)
    assert book.expire() == 1
    assert book.drain_released() == (name,)
    assert book.num_released()[ReleaseCause.EXPIRED] == 1


def test_a_heartbeat_gives_the_lease_its_whole_ttl_again() -> None:
    book, _, clock = a_book(ttl_s=30)
    name = hold(book)
    for _ in range(10):
        clock.advance(20)
        assert book.renew(name)
        assert book.expire() == 0
    clock.advance(30)
    assert book.expire() == 1


def test_a_heartbeat_that_comes_too_late_does_not_bring_a_lease_back() -> None:
    book, _, clock = a_book(ttl_s=30)
    name = hold(book)
    clock.advance(30)
    assert not book.renew(name)
    assert book.expire() == 1
    assert not book.renew(name)


def test_one_requests_leases_are_all_cancelled_and_anothers_stay() -> None:
    book, _, _ = a_book()
    first, second = hold(book), hold(book)
    other = hold(book, RequestId("other"))
    assert book.cancel_request(REQUEST) == 2
    assert set(book.drain_released()) == {first, second}
    assert book.release(other, ReleaseCause.READ)


def test_a_cancellation_that_overtakes_the_handoff_ends_the_lease_at_once() -> None:
    book, _, _ = a_book()
    assert book.cancel_request(REQUEST) == 0
    name = hold(book)
    assert book.num_held == 0
    assert book.drain_released() == (name,)
    later = hold(book)  # the cancellation counted once
    assert book.num_held == 1
    assert later != name


def test_an_early_cancellation_is_forgotten_after_a_ttl() -> None:
    book, _, clock = a_book(ttl_s=30)
    book.cancel_request(REQUEST)
    clock.advance(30)
    book.expire()
    hold(book)
    assert book.num_held == 1


def test_a_flood_of_cancellations_of_requests_that_never_come_is_bounded_though_nobody_expires_them() -> None:
    book, _, clock = a_book(ttl_s=30)
    for number in range(2 * REMEMBERED_CANCELS):
        book.cancel_request(RequestId(f"r{number}"))
    assert len(book._cancelled_early) == REMEMBERED_CANCELS
    hold(book, RequestId("r0"))  # too long ago to be remembered
    assert book.num_held == 1
    hold(book, RequestId(f"r{2 * REMEMBERED_CANCELS - 1}"))
    assert book.num_held == 1
    clock.advance(30)
    hold(book, RequestId(f"r{2 * REMEMBERED_CANCELS - 2}"))
    assert book.num_held == 2
    assert len(book._cancelled_early) == 0


def test_lease_ids_are_never_reused_though_slots_are() -> None:
    book, _, _ = a_book(num_slots=1)
    names = set()
    for _ in range(50):
        name = hold(book)
        names.add(name)
        book.release(name, ReleaseCause.READ)
    assert len(names) == 50


def test_more_leases_than_slots_are_refused_and_change_nothing() -> None:
    book, _, _ = a_book(num_slots=1)
    name = hold(book)
    with pytest.raises(QueueFull):
        hold(book)
    book.check_integrity()
    assert book.release(name, ReleaseCause.ABORTED)


def test_the_next_expiry_is_never_reported_late() -> None:
    book, _, clock = a_book(ttl_s=30)
    assert book.next_expiry_s() is None
    name = hold(book)
    clock.advance(10)
    assert book.next_expiry_s() == 20
    book.release(name, ReleaseCause.READ)
    assert book.next_expiry_s() is None


def test_only_a_held_lease_can_move() -> None:
    for state, target in itertools.product(LeaseState, LeaseState):
        lease = Lease(LeaseId("1-0"), REQUEST, 1, b"", 0.0, state)
        if target in LEASE_TRANSITIONS.targets(state):
            lease.move_to(target)
        else:
            with pytest.raises(IllegalTransition):
                lease.move_to(target)

"""P's side: leases end as D, the proxy or time say, and P sleeps when nothing is held."""

import msgspec
import pytest

from common.errors import QueueFull, TransferError
from common.ids import EngineId, LeaseId, RequestId
from kv_transfer import notifications
from kv_transfer.backends.backend import Message
from kv_transfer.backends.memory_backend import MemoryBackend, MemoryFabric
from kv_transfer.handshake import HandshakeVisit
from kv_transfer.interface import EngineIdentity, ProducerSettings, ReleaseCause
from kv_transfer.producer import ATTENDED_POLL_S, EAGER_POLL_S, HELD_POLL_S, IDLE_POLL_S, KVProducer
from kv_transfer.reference import check
from tests.support.kv_pair import FINGERPRINT, SECRET, Pair, layout_of, pool_of


def send(pair: Pair, message: notifications.Notification) -> None:
    pair.producer.on_message(Message("D", notifications.encode(message)))


def test_a_reference_says_where_the_blocks_are_and_passes_ds_checks() -> None:
    pair = Pair()
    reference = pair.hold("a", 13)
    check(reference, SECRET, EngineId("D"))
    assert (reference.remote_host, reference.remote_port) == ("127.0.0.1", 8100)
    assert (reference.remote_block_ids, reference.block_size, reference.remote_num_tokens) == ((3, 4, 5, 6), 4, 13)
    assert reference.prompt_token_ids == tuple(range(13))


@pytest.mark.parametrize(
    ("message", "cause"), [(notifications.Done, ReleaseCause.READ), (notifications.Abort, ReleaseCause.ABORTED)]
)
def test_ds_word_ends_the_lease_once(
    message: type[notifications.Done] | type[notifications.Abort], cause: ReleaseCause
) -> None:
    pair = Pair()
    reference = pair.hold("a", 13)
    send(pair, message(reference.lease_id))
    send(pair, message(reference.lease_id))
    assert pair.producer.poll_released() == (reference.lease_id,)
    stats = pair.producer.stats()
    assert stats.leases_released[cause] == 1
    assert stats.late_notifications == 1


def test_the_proxys_cancel_ends_the_lease_and_a_later_done_changes_nothing() -> None:
    pair = Pair()
    reference = pair.hold("a", 13)
    assert pair.producer.release(reference.lease_id)
    send(pair, notifications.Done(reference.lease_id))
    assert pair.producer.poll_released() == (reference.lease_id,)


def test_a_cancel_that_overtakes_the_handoff_is_remembered() -> None:
    pair = Pair()
    pair.producer.cancel_request(RequestId("a"))
    reference = pair.hold("a", 13)
    assert pair.producer.poll_released() == (reference.lease_id,)


def test_the_engine_is_woken_for_each_end() -> None:
    clock_pair = Pair()
    woken: list[bool] = []
    backend = MemoryBackend("P9", MemoryFabric(clock_pair.clock))
    producer = KVProducer(
        backend,
        layout_of(pool_of(4, 4), 4),
        EngineIdentity(engine_id=EngineId("P9"), fingerprint=FINGERPRINT),
        ProducerSettings(host="h", port=1, lease_ttl_s=5, max_leases=2),
        clock_pair.clock,
        lambda: woken.append(True),
    )
    first = producer.hold(RequestId("a"), [], [])
    producer.hold(RequestId("b"), [], [])
    with pytest.raises(QueueFull):
        producer.hold(RequestId("c"), [], [])
    producer.release(first.lease_id)
    clock_pair.clock.advance(5)
    producer.step()
    assert len(woken) == 2
    assert first.signature is None


def test_bytes_that_are_no_message_are_counted_and_dropped() -> None:
    pair = Pair()
    pair.producer.on_message(Message("x", b"\xc1"))
    send(pair, notifications.Heartbeat((LeaseId("1-00"),)))
    stats = pair.producer.stats()
    assert (stats.unreadable_notifications, stats.late_notifications) == (1, 1)


def test_p_sleeps_until_woken_while_nobody_knows_it() -> None:
    assert Pair().producer.step() is None


def test_p_polls_often_right_after_a_handoff_and_seldom_later_and_wakes_in_time_to_expire() -> None:
    pair = Pair()
    pair.hold("a", 13)
    assert pair.producer.step() == EAGER_POLL_S
    pair.clock.advance(1)
    assert pair.producer.step() == HELD_POLL_S
    pair.clock.advance(28.995)
    assert pair.producer.step() == pytest.approx(0.005)


def test_p_attends_while_d_connects_and_rests_once_it_said_hello() -> None:
    pair = Pair()
    identity = EngineIdentity(engine_id=EngineId("D"), fingerprint=FINGERPRINT)
    visit = HandshakeVisit(identity, EngineId("P1"), SECRET)
    assert pair.producer.handshake_answer(visit.hello()).status == 200
    assert pair.producer.step() == ATTENDED_POLL_S
    send(pair, notifications.Hello())
    pair.clock.advance(0.2)
    assert pair.producer.step() == IDLE_POLL_S


def test_a_refused_handshake_keeps_p_asleep() -> None:
    pair = Pair()
    assert pair.producer.handshake_answer(b"{}").status == 400
    assert pair.producer.step() is None
    assert msgspec.json.decode(pair.producer.handshake_offer().body)["engine_id"] == "P1"


def test_p_attends_to_a_read_that_needs_it_until_the_lease_ends() -> None:
    pair = Pair()
    first, second = pair.hold("a", 13), pair.hold("b", 4)
    send(pair, notifications.Attend(first.lease_id))
    send(pair, notifications.Attend(second.lease_id))
    send(pair, notifications.Done(first.lease_id))
    assert pair.producer.step() == ATTENDED_POLL_S
    send(pair, notifications.Done(second.lease_id))
    assert pair.producer.step() is None


def test_when_the_driver_dies_every_lease_ends_and_no_new_one_begins() -> None:
    pair = Pair()
    references = [pair.hold("a", 4), pair.hold("b", 4)]
    pair.producer.fail("boom")
    assert set(pair.producer.poll_released()) == {reference.lease_id for reference in references}
    with pytest.raises(TransferError, match="boom"):
        pair.hold("c", 4)


def test_nobody_can_make_p_attend_to_a_lease_that_is_over() -> None:
    pair = Pair()
    send(pair, notifications.Attend(LeaseId("1-00")))
    assert pair.producer.step() is None

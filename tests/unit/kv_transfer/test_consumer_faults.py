"""D's side when things go wrong: cancelled, late, dead, restarted and unreachable peers, over the memory backend."""

import msgspec
import numpy as np

from common.ids import EngineId, RequestId
from kv_transfer.interface import ConsumerSettings, FailureCause, TransferStatus
from kv_transfer.peer import PeerState
from kv_transfer.reference import sign
from tests.support.kv_pair import FINGERPRINT, SECRET, Pair

A = RequestId("a")


def released(pair: Pair) -> dict[str, int]:
    return {cause.value: n for cause, n in pair.producer.stats().leases_released.items() if n}


def pulling_from_a_silent_peer(settings: ConsumerSettings) -> Pair:
    """D has met P, which says nothing any more, and begins the pull of request A."""
    pair = Pair(settings=settings)
    pair.consumer.expect(A, reference := pair.hold("a", 13))
    pair.run()
    pair.fabric.faults.stalled.add("P1")
    pair.consumer.start_pull(pair.order("a", reference))
    return pair


def test_a_cancelled_pull_ends_only_when_the_transport_has_ended() -> None:
    pair = Pair()
    reference = pair.hold("a", 13)
    pair.fabric.faults.read_delay_s = 1.0
    pair.consumer.expect(A, reference)
    pair.consumer.start_pull(pair.order("a", reference))
    pair.run_until(lambda: pair.block_reads == 1)
    pair.consumer.cancel(A)
    assert pair.run() == []  # its blocks are still written to
    outcomes = pair.run_until(lambda: pair.consumer.stats().pulls_running == 0)
    assert [o.status for o in outcomes] == [TransferStatus.CANCELLED]
    before = pair.d_pool.copy()
    pair.clock.advance(100)
    pair.run()
    assert np.array_equal(before, pair.d_pool)
    assert released(pair) == {"aborted": 1}


def test_a_pull_cancelled_before_it_read_ends_at_once() -> None:
    pair = Pair()
    pair.client.answers = False
    reference = pair.hold("a", 13)
    pair.consumer.start_pull(pair.order("a", reference))
    pair.consumer.cancel(A)
    (outcome,) = pair.run(1)
    assert outcome.status is TransferStatus.CANCELLED


def test_a_peer_that_is_silent_before_the_blocks_are_read_times_the_pull_out() -> None:
    pair = pulling_from_a_silent_peer(ConsumerSettings(secret=SECRET, pull_timeout_s=3))
    outcomes = pair.run_until(lambda: pair.consumer.stats().pulls_running == 0)
    assert [o.cause for o in outcomes] == [FailureCause.TIMEOUT]
    assert pair.clock.now_s() < 5


def test_a_read_that_is_late_is_told_so_in_time_and_keeps_its_blocks_until_the_transport_ends() -> None:
    pair = Pair(settings=ConsumerSettings(secret=SECRET, pull_timeout_s=3))
    reference = pair.hold("a", 13)
    pair.consumer.expect(A, reference)
    pair.run()
    pair.fabric.faults.read_delay_s = 0.5
    pair.consumer.start_pull(pair.order("a", reference))
    pair.run_until(lambda: pair.block_reads == 1)
    pair.fabric.faults.stalled.add("P1")
    outcomes = pair.run_until(lambda: pair.clock.now_s() > 10)
    assert [(o.status, o.cause) for o in outcomes] == [(TransferStatus.LATE, FailureCause.TIMEOUT)]
    assert pair.consumer.stats().pulls_running == 1
    pair.fabric.faults.stalled.clear()
    (outcome,) = pair.run(3)
    assert outcome.status is TransferStatus.CANCELLED
    stats = pair.consumer.stats()
    assert (stats.pulls_running, stats.pulls_cancelled, stats.pulls_failed[FailureCause.TIMEOUT]) == (0, 0, 1)
    assert released(pair) == {"aborted": 1}


def test_a_peer_that_dies_during_the_read_fails_the_pull_and_is_met_anew() -> None:
    pair = Pair()
    reference = pair.hold("a", 13)
    pair.fabric.faults.read_delay_s = 1.0
    pair.consumer.expect(A, reference)
    pair.consumer.start_pull(pair.order("a", reference))
    pair.run_until(lambda: pair.block_reads == 1)
    pair.fabric.faults.dead.add("P1")
    (outcome,) = pair.run()
    assert (outcome.status, outcome.cause) == (TransferStatus.FAILED, FailureCause.DISCONNECTED)
    pair.fabric.faults.dead.clear()
    pair.fabric.faults.read_delay_s = 0.0
    assert pair.pull("b", pair.hold("b", 13)).status is TransferStatus.DONE
    assert len(pair.client.calls) == 2


def test_a_connection_that_broke_while_idle_is_renewed_without_failing_the_pull() -> None:
    pair = Pair()
    assert pair.pull("a", pair.hold("a", 13)).status is TransferStatus.DONE
    pair.d_backend.remove_peer("P1")  # the transport dropped it behind our back
    assert pair.pull("b", pair.hold("b", 13)).status is TransferStatus.DONE
    assert len(pair.client.calls) == 2


def test_a_peer_that_does_not_answer_fails_the_handshake_within_its_time() -> None:
    pair = Pair()
    pair.client.answers = False
    pair.consumer.start_pull(pair.order("a", pair.hold("a", 13)))
    outcomes = pair.run_until(lambda: pair.consumer.stats().pulls_running == 0)
    assert [o.cause for o in outcomes] == [FailureCause.HANDSHAKE_FAILED]
    assert 4.9 < pair.clock.now_s() < 5.5


def test_a_wrong_port_fails_this_request_and_not_the_next() -> None:
    pair = Pair()
    reference = pair.hold("a", 13)
    unsigned = msgspec.structs.replace(reference, signature=None, remote_port=9, remote_engine_id=EngineId("P9"))
    assert pair.pull("a", sign(unsigned, SECRET)).cause is FailureCause.HANDSHAKE_FAILED
    assert pair.pull("b", pair.hold("b", 13)).status is TransferStatus.DONE


def test_a_failed_handshake_answers_for_a_moment_and_is_then_tried_again() -> None:
    pair = Pair()
    producer = pair.client.desks.pop(("127.0.0.1", 8100))
    assert pair.pull("a", pair.hold("a", 13)).cause is FailureCause.HANDSHAKE_FAILED
    assert pair.pull("b", pair.hold("b", 13)).cause is FailureCause.HANDSHAKE_FAILED
    assert len(pair.client.calls) == 1
    pair.client.desks[("127.0.0.1", 8100)] = producer
    pair.clock.advance(1)
    assert pair.pull("c", pair.hold("c", 13)).status is TransferStatus.DONE


def test_an_incompatible_peer_is_refused_by_name() -> None:
    pair = Pair(fingerprint=msgspec.structs.replace(FINGERPRINT, num_layers=3))
    outcome = pair.pull("a", pair.hold("a", 13))
    assert outcome.cause is FailureCause.INCOMPATIBLE
    assert outcome.reason is not None
    assert "num_layers" in outcome.reason
    assert pair.fabric.reads == []


def test_memory_that_is_not_the_engines_fails_the_greeting() -> None:
    pair = Pair()
    reference = pair.hold("a", 13)
    pair.producer._leases._guard._words[0] = 0
    assert pair.pull("a", reference).cause is FailureCause.HANDSHAKE_FAILED


def test_after_a_restart_old_references_are_refused_and_new_ones_work() -> None:
    pair = Pair()
    first, stale = pair.hold("a", 13), pair.hold("s", 13)
    assert pair.pull("a", first).status is TransferStatus.DONE
    pair.fabric.faults.dead.add("P1")
    pair.start_producer("P2", seed=2)
    assert pair.pull("s", stale).cause is FailureCause.REFUSED
    reference = pair.hold("b", 13)
    assert pair.pull("b", reference).status is TransferStatus.DONE
    assert np.array_equal(pair.p_pool[3:6], pair.d_pool[:3])
    assert pair.consumer.stats().peers_ready == 1


def test_when_the_driver_dies_every_pull_fails_and_so_does_the_next() -> None:
    pair = Pair()
    pair.client.answers = False
    woken: list[bool] = []
    pair.consumer.on_outcome(lambda: woken.append(True))
    pair.consumer.start_pull(pair.order("a", pair.hold("a", 13)))
    pair.run(1)
    pair.consumer.fail("boom")
    pair.consumer.start_pull(pair.order("b", pair.hold("b", 13)))
    assert [o.status for o in pair.consumer.poll()] == [TransferStatus.FAILED] * 2
    assert len(woken) == 2


def test_fifty_pulls_from_a_peer_that_died_leave_nothing_behind() -> None:
    pair = Pair()
    assert pair.pull("first", pair.hold("first", 4)).status is TransferStatus.DONE
    pair.fabric.faults.dead.add("P1")
    pair.client.desks.clear()
    for i in range(50):
        request = RequestId(f"r{i}")
        pair.consumer.expect(request, reference := pair.hold(f"r{i}", 4))
        pair.consumer.start_pull(pair.order(f"r{i}", reference))
        pair.consumer.cancel(request)
    outcomes = pair.run_until(lambda: pair.consumer.stats().pulls_running == 0)
    assert len(outcomes) == 50
    assert pair.consumer.stats().expected == 0
    assert all(peer is None or peer.state is PeerState.FAILED for peer in [pair.consumer._peers.find(EngineId("P1"))])


def test_a_peer_that_was_lost_is_not_met_again_before_what_is_read_from_it_has_ended() -> None:
    pair = Pair()
    pair.fabric.faults.read_delay_s, pair.fabric.faults.delays_from_bytes = 2.0, 33  # blocks take long, words do not
    first = pair.hold("a", 13)
    pair.consumer.expect(A, first)
    pair.consumer.start_pull(pair.order("a", first))
    pair.run_until(lambda: pair.block_reads == 1)
    peer = pair.consumer._peers.find(EngineId("P1"))
    assert peer is not None
    pair.consumer._peers.lost(peer)  # as a message that cannot be sent does
    second = pair.hold("b", 13, block_ids=range(8, 12))
    pair.consumer.start_pull(pair.order("b", second, first_block=8))
    pair.run()  # the transport's map of P would be replaced here: MemoryBackend raises
    assert pair.block_reads == 1
    outcomes = pair.run_until(lambda: pair.consumer.stats().pulls_running == 0)
    assert [(o.request_id, o.status) for o in outcomes] == [
        ("a", TransferStatus.DONE),  # confirmed by the connection that its blocks came by
        ("b", TransferStatus.DONE),
    ]
    assert np.array_equal(pair.d_pool[:4], pair.p_pool[3:7])
    assert np.array_equal(pair.d_pool[8:12], pair.p_pool[8:12])
    pair.run()
    assert released(pair) == {"read": 2}


def test_a_word_that_never_comes_keeps_the_peers_memory_map_after_its_pull_was_given_up() -> None:
    pair = pulling_from_a_silent_peer(ConsumerSettings(secret=SECRET, pull_timeout_s=3))
    pair.run_until(lambda: pair.consumer.stats().pulls_running == 0)
    peer = pair.consumer._peers.find(EngineId("P1"))
    assert peer is not None
    pair.consumer._peers.lost(peer)
    pair.run()
    assert pair.d_backend.knows("P1")
    pair.fabric.faults.stalled.clear()
    pair.run()
    assert not pair.d_backend.knows("P1")


def test_peers_are_met_while_as_many_pulls_as_may_be_do_not_get_on() -> None:
    pair = pulling_from_a_silent_peer(ConsumerSettings(secret=SECRET, max_pulls=1))
    pair.run()
    pair.start_producer("P2", seed=2)
    pair.consumer.expect(RequestId("b"), pair.hold("b", 4))
    pair.run()
    assert pair.consumer.stats().peers_ready == 2

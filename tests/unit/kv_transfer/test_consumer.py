"""D's side over the memory backend: right bytes, or no bytes and a named cause; and P always gets its blocks back."""

import msgspec
import numpy as np
import pytest

from common.ids import BlockId, EngineId, LeaseId, RequestId
from common.wire.kv_params import KvReference
from kv_transfer.backends.memory_backend import MemoryBackend
from kv_transfer.consumer import KVConsumer
from kv_transfer.driver import TransferDriver
from kv_transfer.interface import ConsumerSettings, EngineIdentity, FailureCause, ReleaseCause, TransferStatus
from kv_transfer.reference import lease_id, sign
from tests.support.kv_pair import FINGERPRINT, SECRET, Pair, layout_of, pool_of, tokens_of

A, B = RequestId("a"), RequestId("b")


def released(pair: Pair) -> dict[str, int]:
    return {cause.value: n for cause, n in pair.producer.stats().leases_released.items() if n}


@pytest.mark.parametrize(("p_size", "d_size"), [(4, 4), (4, 8), (8, 4), (4, 6), (6, 4), (1, 5)])
def test_the_bytes_of_every_token_arrive_whatever_the_block_sizes(p_size: int, d_size: int) -> None:
    pair = Pair(p_size, d_size)
    num_tokens = 13
    reference = pair.hold("a", num_tokens)
    assert pair.pull("a", reference).status is TransferStatus.DONE
    wanted = tokens_of(pair.p_pool, p_size, reference.remote_block_ids, 0, num_tokens)
    got = tokens_of(pair.d_pool, d_size, range(-(-num_tokens // d_size)), 0, num_tokens)
    assert np.array_equal(wanted, got)
    pair.run()
    assert released(pair) == {"read": 1}
    assert pair.consumer.stats().pulls_done == 1


def test_only_the_blocks_that_are_missing_here_are_read() -> None:
    pair = Pair()
    reference = pair.hold("a", 13)
    assert pair.pull("a", reference, start=8, first_block=2).status is TransferStatus.DONE
    assert np.count_nonzero(pair.d_pool[:2]) == 0
    assert pair.consumer.stats().descriptors == 2
    wanted = tokens_of(pair.p_pool, 4, reference.remote_block_ids, 8, 13)
    assert np.array_equal(wanted, tokens_of(pair.d_pool, 4, [2, 3], 0, 5))


def test_nothing_is_read_before_the_pull_is_started_but_the_lease_is_kept_alive() -> None:
    pair = Pair()
    reference = pair.hold("a", 13)
    pair.consumer.expect(A, reference)
    for _ in range(200):  # 100 s of grammar compile; the lease lives 30 s
        pair.run(1)
        pair.clock.advance(0.5)
    assert pair.block_reads == 0
    assert pair.producer.stats().leases_held == 1
    pair.consumer.start_pull(pair.order("a", reference))
    (outcome,) = pair.run()
    assert outcome.status is TransferStatus.DONE


def test_a_lease_that_ran_out_before_the_pull_is_never_read() -> None:
    pair = Pair()
    reference = pair.hold("a", 13)
    pair.run_until(lambda: pair.producer.stats().leases_held == 0, step_s=1)
    outcome = pair.pull("a", reference)
    assert (outcome.status, outcome.cause) == (TransferStatus.FAILED, FailureCause.EXPIRED)
    assert pair.block_reads == 0
    assert released(pair) == {"expired": 1}


def test_blocks_freed_while_they_are_read_are_not_accepted() -> None:
    pair = Pair()
    reference = pair.hold("a", 13)
    pair.fabric.faults.read_delay_s = 1.0
    pair.consumer.expect(A, reference)
    pair.consumer.start_pull(pair.order("a", reference))
    pair.run_until(lambda: pair.block_reads == 1)
    pair.producer.release(reference.lease_id)
    pair.p_pool[:] = 255  # P's next request
    outcomes = pair.run_until(lambda: pair.consumer.stats().pulls_running == 0)
    assert [o.cause for o in outcomes] == [FailureCause.EXPIRED]


def test_a_reference_that_was_read_is_refused_the_second_time() -> None:
    pair = Pair()
    reference = pair.hold("a", 13)
    assert pair.pull("a", reference).status is TransferStatus.DONE
    reads = len(pair.fabric.reads)
    assert pair.pull("b", reference).cause is FailureCause.REFUSED
    assert len(pair.fabric.reads) == reads


def test_a_reference_that_another_d_has_read_is_not_read_again_though_p_reused_the_blocks() -> None:
    pair = Pair()
    reference = pair.hold("a", 13)
    assert pair.pull("a", reference).status is TransferStatus.DONE
    pair.run()
    pair.hold("next", 13)  # takes the same blocks for another prompt
    backend, pool = MemoryBackend("D2", pair.fabric), pool_of(16, 4)
    other = KVConsumer(
        backend,
        layout_of(pool, 4),
        EngineIdentity(engine_id=EngineId("D2"), fingerprint=FINGERPRINT),
        ConsumerSettings(secret=SECRET),
        pair.clock,
        pair.client,
    )
    driver = TransferDriver(backend, [other])
    other.start_pull(pair.order("a", reference))
    for _ in range(4):
        driver.run_once()
    (outcome,) = other.poll()
    assert outcome.cause is FailureCause.EXPIRED
    assert not pool.any()


@pytest.mark.parametrize(
    "changes",
    [
        {"remote_block_ids": tuple(BlockId(10**6 + i) for i in range(4))},
        {"lease_id": lease_id(10**6, bytes(16))},
        {"lease_id": lease_id(0, bytes(16))},
        {"block_size": 2, "remote_block_ids": tuple(BlockId(i) for i in range(7))},
    ],
)
def test_a_signed_reference_outside_of_the_peers_memory_is_not_read(changes: dict[str, object]) -> None:
    pair = Pair()
    forged = sign(msgspec.structs.replace(pair.hold("a", 13), signature=None, **changes), SECRET)
    outcome = pair.pull("a", forged)
    assert outcome.cause is FailureCause.REFUSED
    assert pair.block_reads == 0


def test_an_altered_reference_is_not_read_even_where_references_are_unsigned() -> None:
    pair = Pair(settings=ConsumerSettings(), producer_secret=None)
    reference = pair.hold("a", 13)
    pair.hold("victim", 13, block_ids=range(8, 12))
    altered = msgspec.structs.replace(reference, remote_block_ids=tuple(BlockId(i) for i in range(8, 12)))
    outcome = pair.pull("a", altered)
    assert (outcome.cause, pair.block_reads) == (FailureCause.REFUSED, 0)
    assert released(pair) == {}


@pytest.mark.parametrize("change", [{"remote_engine_id": EngineId("P9")}, {"remote_num_tokens": 12}])
def test_an_altered_reference_does_not_spoil_the_true_one(change: dict[str, object]) -> None:
    pair = Pair(settings=ConsumerSettings(), producer_secret=None)
    reference = pair.hold("a", 13, block_ids=range(3, 7))
    altered = msgspec.structs.replace(reference, **change)
    if "remote_num_tokens" in change:
        altered = msgspec.structs.replace(altered, remote_block_ids=reference.remote_block_ids[:3])
    assert pair.pull("a", altered).cause is FailureCause.REFUSED
    assert pair.pull("b", reference).status is TransferStatus.DONE
    pair.run()
    assert released(pair) == {"read": 1}


def test_a_bad_signature_opens_no_connection() -> None:
    pair = Pair()
    reference = msgspec.structs.replace(pair.hold("a", 13), remote_host="169.254.0.1")
    assert pair.pull("a", reference).cause is FailureCause.REFUSED
    assert pair.client.calls == []


def test_more_tokens_than_the_reference_holds_are_refused() -> None:
    pair = Pair()
    assert pair.pull("a", pair.hold("a", 13), end=14).cause is FailureCause.REFUSED


def test_a_second_request_with_a_live_reference_is_refused_and_the_first_is_not_disturbed() -> None:
    pair = Pair()
    reference = pair.hold("a", 13)
    pair.consumer.expect(A, reference)
    assert pair.pull("b", reference).cause is FailureCause.REFUSED
    pair.consumer.abandon(B)
    pair.run()
    pair.consumer.start_pull(pair.order("a", reference))
    (outcome,) = pair.run()
    assert outcome.status is TransferStatus.DONE


def test_two_live_requests_of_one_name_on_p_have_leases_of_their_own() -> None:
    pair = Pair()
    first, second = pair.hold("same", 8, [1, 2]), pair.hold("same", 8, [3, 4])
    assert first.lease_id != second.lease_id
    assert pair.pull("a", first).status is TransferStatus.DONE
    assert pair.pull("b", second, first_block=4).status is TransferStatus.DONE
    assert np.array_equal(pair.d_pool[4:6], pair.p_pool[3:5])


def test_an_abandoned_request_frees_p_at_once_and_only_once() -> None:
    pair = Pair()
    reference = pair.hold("a", 13)
    pair.consumer.expect(A, reference)
    pair.consumer.abandon(A)
    pair.consumer.abandon(A)
    pair.run()
    assert released(pair) == {"aborted": 1}
    assert pair.producer.poll_released() == (reference.lease_id,)
    assert pair.block_reads == 0
    assert pair.consumer.stats().expected == 0


def test_a_message_that_waited_for_the_handshake_is_seen_off_as_well() -> None:
    pair = Pair()
    pair.client.answers = False
    pair.consumer.expect(A, pair.hold("a", 13))
    pair.consumer.abandon(A)
    pair.d_driver.run_once()
    pair.clock.advance(2.0)
    pair.client.answer_now()
    while not pair.consumer.stats().peers_ready:
        pair.d_driver.run_once()
    delay_s = pair.d_driver.run_once()
    assert delay_s is not None, "nobody would drive the transport"
    assert delay_s < 0.01
    pair.clock.advance(2.0)
    pair.d_driver.run_once()
    delay_s = pair.d_driver.run_once()
    assert delay_s is None or delay_s > 0.01


def test_a_reference_that_d_dismisses_unseen_frees_p() -> None:
    pair = Pair()
    for i in range(20):
        pair.consumer.dismiss(pair.hold(f"r{i}", 13))
    pair.run()
    assert released(pair) == {"aborted": 20}


def test_a_forged_reference_cannot_be_used_to_free_a_lease() -> None:
    pair = Pair()
    reference = pair.hold("a", 13)
    pair.consumer.dismiss(msgspec.structs.replace(reference, signature="0" * 64))
    pair.consumer.expect(A, reference)
    pair.consumer.dismiss(reference)  # it is a live request's
    pair.run()
    assert pair.producer.stats().leases_held == 1


def test_a_pull_of_nothing_confirms_the_lease_and_frees_it() -> None:
    pair = Pair()
    reference = pair.hold("a", 12)
    outcome = pair.pull("a", reference, start=12, end=12)
    assert outcome.status is TransferStatus.DONE
    assert pair.block_reads == 0
    pair.run()
    assert released(pair) == {"read": 1}


def test_when_every_message_is_lost_expiry_frees_the_blocks() -> None:
    pair = Pair()
    pair.fabric.faults.loses_messages = True
    assert pair.pull("a", pair.hold("a", 13)).status is TransferStatus.DONE
    pair.run_until(lambda: pair.producer.stats().leases_held == 0, step_s=1)
    assert released(pair) == {"expired": 1}
    assert pair.clock.now_s() < 32


def test_a_peer_that_nobody_uses_is_forgotten() -> None:
    pair = Pair()
    assert pair.pull("a", pair.hold("a", 13)).status is TransferStatus.DONE
    pair.clock.advance(601)
    pair.run()
    assert pair.consumer.stats().peers_ready == 0
    assert pair.pull("b", pair.hold("b", 13)).status is TransferStatus.DONE


def test_more_pulls_than_places_wait_their_turn() -> None:
    pair = Pair(settings=ConsumerSettings(secret=SECRET, max_pulls=1))
    pair.fabric.faults.read_delay_s = 0.2
    references = [pair.hold(f"r{i}", 4, [i]) for i in range(6)]
    for i, reference in enumerate(references):
        pair.consumer.start_pull(pair.order(f"r{i}", reference, first_block=i))
    pair.run_until(lambda: pair.block_reads > 0, step_s=0.05)
    pair.run()
    assert pair.block_reads == 1
    outcomes = pair.run_until(lambda: pair.consumer.stats().pulls_running == 0, step_s=0.05)
    assert [o.status for o in outcomes] == [TransferStatus.DONE] * 6
    assert np.array_equal(pair.d_pool[:6], pair.p_pool[:6])


def test_the_same_request_announced_twice_is_one() -> None:
    pair = Pair()
    reference = pair.hold("a", 13)
    pair.consumer.expect(A, reference)
    assert pair.pull("a", reference).status is TransferStatus.DONE


def test_release_causes_have_their_metric_labels() -> None:
    assert {cause.value for cause in ReleaseCause} == {"read", "aborted", "cancelled", "expired"}


def test_a_lease_that_p_never_gave_out_is_not_read() -> None:
    pair = Pair()
    reference: KvReference = pair.hold("a", 13)
    invented = msgspec.structs.replace(reference, signature=None, lease_id=LeaseId(lease_id(1, bytes(16))))
    outcome = pair.pull("a", sign(invented, SECRET))
    assert (outcome.cause, pair.block_reads) == (FailureCause.EXPIRED, 0)

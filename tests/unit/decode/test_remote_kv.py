"""The engine's port onto the consumer: plans go in, outcomes come out, the engine is woken."""

import numpy as np

from common.engine.ports import KVSource, PullOutcome, PullPlan, PullStatus
from common.ids import BlockId, RequestId
from common.wire.kv_params import KvReference
from decode.remote_kv import RemoteKV
from tests.support.kv_pair import Pair

A = RequestId("a")


def a_plan(reference: KvReference) -> PullPlan:
    return PullPlan(
        request_id=A, reference=reference, start_token=4, end_token=9, block_ids=(BlockId(5), BlockId(6)), block_size=4
    )


def test_a_plan_becomes_a_pull_and_its_outcome_wakes_the_engine() -> None:
    pair, woken = Pair(), list[bool]()
    source: KVSource = RemoteKV(pair.consumer, lambda: woken.append(True))
    reference = pair.hold("a", 9)
    source.expect(A, reference)
    source.start_pull(a_plan(reference))
    pair.d_driver.run_once()
    pair.d_driver.run_once()
    assert list(source.poll()) == [PullOutcome(request_id=A, status=PullStatus.DONE)]
    assert woken == [True]
    assert np.array_equal(pair.d_pool[5:7], pair.p_pool[[4, 5]])
    assert source.poll() == []


def test_a_failure_carries_its_metric_label_and_a_sentence() -> None:
    pair = Pair()
    source = RemoteKV(pair.consumer, lambda: None)
    reference = pair.hold("a", 9)
    pair.producer.release(reference.lease_id)
    source.start_pull(a_plan(reference))
    pair.d_driver.run_once()
    pair.d_driver.run_once()
    (outcome,) = source.poll()
    assert (outcome.status, outcome.cause) == (PullStatus.FAILED, "expired")
    assert outcome.reason


def test_cancel_abandon_and_dismiss_tell_p() -> None:
    pair = Pair()
    source = RemoteKV(pair.consumer, lambda: None)
    first, second, third = pair.hold("a", 9), pair.hold("b", 9), pair.hold("c", 9)
    source.start_pull(a_plan(first))
    source.cancel(A)
    source.expect(RequestId("b"), second)
    source.abandon(RequestId("b"))
    source.dismiss(third)
    pair.d_driver.run_once()
    pair.p_driver.run_once()
    assert [outcome.status for outcome in source.poll()] == [PullStatus.CANCELLED]
    assert pair.producer.stats().leases_held == 0

"""Corrupted references, signed and unsigned, all the way through D: never a block read, never a crash."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidRequest
from common.ids import BlockId, RequestId
from common.wire.kv_params import KvReference, parse
from kv_transfer.interface import ConsumerSettings, PullOrder, TransferStatus
from kv_transfer.reference import digest, lease_id
from tests.support.kv_pair import SECRET, Pair

INTEGERS = st.integers(-(1 << 40), 1 << 40) | st.sampled_from([0, 1, 2, 4, 13, 16, 8100])
ANYTHING = (
    st.none()
    | st.booleans()
    | INTEGERS
    | st.floats()
    | st.text(max_size=8)
    | st.lists(INTEGERS, max_size=20)
    | st.sampled_from(["P1", "D", "127.0.0.1", "localhost", "r", lease_id(1, bytes(16)), lease_id(0, bytes(16))])
)


@pytest.mark.parametrize("secret", [SECRET, None], ids=["signed", "unsigned"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_corrupted_reference_is_never_read(secret: bytes | None, data: st.DataObject) -> None:
    pair = Pair(settings=ConsumerSettings(secret=secret), producer_secret=secret)
    original = pair.hold("r", 13)
    body: dict[str, Any] = original.to_json()
    for key in data.draw(st.lists(st.sampled_from(sorted(body)), min_size=1, max_size=3, unique=True)):
        if data.draw(st.booleans()):
            body[key] = data.draw(ANYTHING)
        else:
            del body[key]
    try:
        reference = parse(body)
    except InvalidRequest:
        return
    if not isinstance(reference, KvReference) or digest(reference) == digest(original):
        return
    pair.consumer.expect(RequestId("r"), reference)
    order = PullOrder(
        request_id=RequestId("r"),
        reference=reference,
        start_token=0,
        end_token=max(1, min(reference.remote_num_tokens, 64)),
        block_ids=tuple(BlockId(i) for i in range(16)),
    )
    pair.consumer.start_pull(order)
    outcomes = pair.run_until(lambda: pair.consumer.stats().pulls_running == 0, step_s=1.0)
    assert [outcome.status for outcome in outcomes] == [TransferStatus.FAILED]
    assert pair.block_reads == 0
    assert not pair.d_pool.any()

"""Messages from D to P."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.ids import LeaseId
from kv_transfer.notifications import Abort, Attend, Done, Heartbeat, Hello, Notification, decode, encode

LEASE = LeaseId("1-00")


@pytest.mark.parametrize("message", [Hello(), Attend(LEASE), Heartbeat((LEASE, LEASE)), Done(LEASE), Abort(LEASE)])
def test_a_message_survives_the_wire(message: Notification) -> None:
    assert decode(encode(message)) == message


@given(st.binary(max_size=64))
def test_bytes_of_others_are_no_message(payload: bytes) -> None:
    message = decode(payload)
    assert message is None or decode(encode(message)) == message

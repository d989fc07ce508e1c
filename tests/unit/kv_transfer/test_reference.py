"""References: equal ones sign equally, and any change is refused before a connection is made."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidRequest, ReferenceRefused
from common.ids import BlockId, EngineId, LeaseId, RequestId
from common.wire.kv_params import KvReference, parse
from kv_transfer.reference import check, digest, is_loopback, lease_id, parse_lease_id, sign

SECRET = b"s"
OWN = EngineId("D")


def a_reference(**changes: Any) -> KvReference:
    fields: dict[str, Any] = {
        "remote_engine_id": EngineId("P"),
        "remote_request_id": RequestId("r"),
        "remote_host": "127.0.0.1",
        "remote_port": 8100,
        "remote_block_ids": (BlockId(4), BlockId(2)),
        "remote_num_tokens": 20,
        "block_size": 16,
        "lease_id": lease_id(3, bytes(range(16))),
        "lease_ttl_s": 30.0,
        "prompt_token_ids": tuple(range(20)),
    }
    return KvReference(**{**fields, **changes})


def test_a_signed_reference_survives_json_and_is_accepted() -> None:
    travelled = msgspec.json.decode(msgspec.json.encode(sign(a_reference(), SECRET).to_json()))
    reference = parse(travelled)
    assert isinstance(reference, KvReference)
    check(reference, SECRET, OWN)


def test_a_whole_number_of_seconds_spelled_as_an_integer_keeps_its_signature() -> None:
    body = sign(a_reference(), SECRET).to_json() | {"lease_ttl_s": 30}
    reference = parse(body)
    assert isinstance(reference, KvReference)
    check(reference, SECRET, OWN)


def test_an_unsigned_reference_is_refused_when_a_secret_is_shared() -> None:
    with pytest.raises(ReferenceRefused, match="not signed"):
        check(a_reference(), SECRET, OWN)


def test_a_signature_by_another_secret_is_refused() -> None:
    with pytest.raises(ReferenceRefused, match="signature"):
        check(sign(a_reference(), b"other"), SECRET, OWN)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("remote_engine_id", "Q"),
        ("remote_request_id", "other"),
        ("remote_host", "10.0.0.1"),
        ("remote_port", 22),
        ("remote_block_ids", (BlockId(4), BlockId(3))),
        ("remote_num_tokens", 19),
        ("lease_id", lease_id(4, bytes(range(16)))),
        ("lease_ttl_s", 31.0),
        ("prompt_token_ids", (*range(19), 7)),
        ("tp_size", 2),
        ("block_size", 17),
    ],
)
def test_every_field_is_under_the_signature(field: str, value: object) -> None:
    signed = sign(a_reference(), SECRET)
    with pytest.raises(ReferenceRefused, match="signature"):
        check(msgspec.structs.replace(signed, **{field: value}), SECRET, OWN)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"remote_engine_id": OWN}, "itself"),
        ({"tp_size": 2}, "tp_size"),
        ({"remote_port": 0}, "port"),
        ({"remote_port": 1 << 16}, "port"),
        ({"lease_ttl_s": 0.0}, "expired"),
        ({"lease_ttl_s": float("nan")}, "expired"),
        ({"block_size": 0}, "positive"),
        ({"remote_num_tokens": 0}, "positive"),
        ({"remote_num_tokens": 21}, "exceeds"),
        ({"remote_block_ids": (BlockId(1),)}, "blocks"),
        ({"remote_block_ids": ()}, "blocks"),
        ({"remote_block_ids": (BlockId(1), BlockId(1))}, "repeat"),
        ({"remote_block_ids": (BlockId(1), BlockId(-1))}, "negative"),
        ({"lease_id": LeaseId("x")}, "lease_id"),
        ({"do_remote_decode": True}, "read from"),
    ],
)
def test_a_rightly_signed_reference_that_makes_no_sense_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ReferenceRefused, match=why):
        check(sign(a_reference(**changes), SECRET), SECRET, OWN)


def test_without_a_secret_only_loopback_hosts_are_accepted() -> None:
    check(a_reference(), None, OWN)
    with pytest.raises(ReferenceRefused, match="loopback"):
        check(a_reference(remote_host="10.0.0.1"), None, OWN)
    assert is_loopback("localhost")
    assert is_loopback("::1")
    assert not is_loopback("example.org")


@given(st.text(max_size=60))
def test_a_lease_id_is_either_read_back_exactly_or_refused(text: str) -> None:
    try:
        slot, generation = parse_lease_id(LeaseId(text))
    except ReferenceRefused:
        return
    assert lease_id(slot, generation) == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 40), 1 << 40) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_mutation_of_a_signed_body_is_accepted_unless_it_changes_nothing(data: st.DataObject) -> None:
    original = sign(a_reference(), SECRET)
    body = original.to_json()
    key = data.draw(st.sampled_from(sorted(body)))
    if data.draw(st.booleans()):
        del body[key]
    else:
        body[key] = data.draw(JSON)
    try:
        reference = parse(body)
        if not isinstance(reference, KvReference):
            return
        check(reference, SECRET, OWN)
    except (InvalidRequest, ReferenceRefused):
        return
    assert digest(reference) == digest(original)

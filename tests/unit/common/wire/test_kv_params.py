import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequest
from common.ids import BlockId, EngineId, LeaseId, RequestId
from common.wire.kv_params import KvReference, PrefillAsk, parse

REFERENCE = KvReference(
    remote_engine_id=EngineId("prefill-1"),
    remote_request_id=RequestId("r-1"),
    remote_host="127.0.0.1",
    remote_port=8100,
    remote_block_ids=(BlockId(3), BlockId(4)),
    remote_num_tokens=20,
    block_size=16,
    lease_id=LeaseId("5.abc"),
    lease_ttl_s=30.0,
    prompt_token_ids=tuple(range(20)),
)
VALUES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers(), max_size=3)
)


def test_a_reference_survives_the_wire() -> None:
    assert parse(msgspec.json.decode(msgspec.json.encode(REFERENCE.to_json()))) == REFERENCE


def test_foreign_members_of_a_reference_are_tolerated_as_other_routers_add_them() -> None:
    assert parse({**REFERENCE.to_json(), "dcp_size": 1, "transfer_mode": "pull"}) == REFERENCE


@pytest.mark.parametrize("value", [None, {}, {"do_remote_decode": False}, {"do_remote_prefill": False, "x": 1}])
def test_parameters_that_ask_for_nothing_are_none(value: dict[str, object] | None) -> None:
    assert parse(value) is None


def test_an_ask_carries_what_the_proxy_changed() -> None:
    ask = parse({"do_remote_decode": True, "constraint": "ignore", "decode_fields": {"n": 2}})
    assert ask == PrefillAsk(constraint="ignore", decode_fields={"n": 2})


@pytest.mark.parametrize(
    "value",
    [
        {"do_remote_decode": True, "do_remote_prefill": True},
        {"do_remote_decode": True, "constraint": "sometimes"},
        {"do_remote_decode": True, "decode_fields": [1]},
        {"do_remote_prefill": True},
        {**REFERENCE.to_json(), "remote_block_ids": "all"},
    ],
)
def test_contradictions_and_half_references_are_refused_by_name(value: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(value)
    assert (refused.value.param or "").startswith("kv_transfer_params")


@given(st.sampled_from(sorted(REFERENCE.to_json())), VALUES)
def test_any_member_replaced_by_anything_is_a_reference_or_a_clean_refusal(name: str, value: object) -> None:
    try:
        found = parse({**REFERENCE.to_json(), name: value})
    except InvalidRequest:
        return
    assert found is None or isinstance(found, KvReference | PrefillAsk)

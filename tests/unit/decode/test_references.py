import msgspec
import pytest

from common.errors import ReferenceRefused
from common.ids import BlockId, EngineId, LeaseId, RequestId
from common.wire.kv_params import KvReference
from decode.references import ReferenceGate
from kv_transfer.reference import sign

SECRET = b"sixteen or more bytes"
REFERENCE = sign(
    KvReference(
        remote_engine_id=EngineId("p-1"),
        remote_request_id=RequestId("r-1"),
        remote_host="10.0.0.1",
        remote_port=8100,
        remote_block_ids=(BlockId(3),),
        remote_num_tokens=4,
        block_size=16,
        lease_id=LeaseId("1-" + "ab" * 16),
        lease_ttl_s=30.0,
        prompt_token_ids=(1, 2, 3, 4),
    ),
    SECRET,
)


class RecordingRemoteKV:
    def __init__(self) -> None:
        self.dismissed: list[KvReference] = []

    def dismiss(self, reference: KvReference) -> None:
        self.dismissed.append(reference)


def gate(policy: str, secret: bytes | None = SECRET) -> tuple[ReferenceGate, RecordingRemoteKV]:
    remote = RecordingRemoteKV()
    return ReferenceGate(remote, EngineId("d-1"), secret, policy), remote  # type: ignore[arg-type] # a stand-in


def test_a_reference_as_p_signed_it_is_believed():
    assert gate("fail")[0].admit(REFERENCE) == REFERENCE


@pytest.mark.parametrize(
    "changed",
    [{"signature": None}, {"remote_host": "10.0.0.2"}, {"prompt_token_ids": (1, 2, 3, 5)}, {"remote_block_ids": (4,)}],
)
def test_a_changed_one_is_recomputed_or_refused_by_policy_and_counted(changed: dict):
    forged = msgspec.structs.replace(REFERENCE, **changed)
    strict, _ = gate("fail")
    with pytest.raises(ReferenceRefused):
        strict.admit(forged)
    lenient, _ = gate("recompute")
    assert lenient.admit(forged) is None
    (reading,) = lenient.readings()
    assert (reading.value, reading.labels) == (1, ("reference_not_valid",))


def test_without_a_secret_no_other_machine_is_contacted():
    with pytest.raises(ReferenceRefused, match="loopback"):
        gate("fail", secret=None)[0].admit(REFERENCE)


def test_a_refused_request_lets_p_release():
    door, remote = gate("fail")
    door.refuse(REFERENCE)
    assert remote.dismissed == [REFERENCE]

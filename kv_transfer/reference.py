"""Is this reference what P wrote? Digest, signature, and the lease id's two halves.

Owns: the canonical bytes of a `KvReference` and everything that can be refused without asking P (journey row 5).
Does not know: whether the lease still lives; the guard word says that.
"""

import hashlib
import hmac
from ipaddress import ip_address

import msgspec

from common.errors import ReferenceRefused
from common.ids import EngineId, LeaseId
from common.wire.kv_params import KvReference

GENERATION_BYTES = 16
"""A lease's generation: random, never reused, and unguessable."""


def lease_id(slot: int, generation: bytes) -> LeaseId:
    """`slot-generation`, both hexadecimal: where the guard word lies and what must stand there."""
    return LeaseId(f"{slot:x}-{generation.hex()}")


def parse_lease_id(value: LeaseId) -> tuple[int, bytes]:
    """Guard slot and generation.

    Raises:
        ReferenceRefused: not a lease id of ours.
    """
    slot_text, _, generation_text = value.partition("-")
    try:
        slot, generation = int(slot_text, 16), bytes.fromhex(generation_text)
    except ValueError as error:
        raise ReferenceRefused("lease_id is malformed") from error
    if slot < 0 or len(generation) != GENERATION_BYTES or lease_id(slot, generation) != value:
        raise ReferenceRefused("lease_id is malformed")
    return slot, generation


def digest(reference: KvReference) -> bytes:
    """SHA-256 over every field but the signature, 32 bytes; the same in any JSON spelling of the reference."""
    fields = (
        reference.remote_engine_id,
        reference.remote_request_id,
        reference.remote_host,
        reference.remote_port,
        reference.remote_block_ids,
        reference.remote_num_tokens,
        reference.block_size,
        reference.lease_id,
        float(reference.lease_ttl_s),
        reference.prompt_token_ids,
        reference.tp_size,
    )
    return hashlib.sha256(msgspec.msgpack.encode(fields)).digest()


def sign(reference: KvReference, secret: bytes | None) -> KvReference:
    """The reference with its HMAC-SHA256 (RFC 2104) in `signature`; unchanged without a secret."""
    if secret is None:
        return reference
    return msgspec.structs.replace(reference, signature=_mac(digest(reference), secret))


def check(reference: KvReference, secret: bytes | None, own_engine_id: EngineId) -> bytes:
    """Refuse what can be refused without any connection. Changes nothing.

    With a secret, a right signature is required. Without one, only loopback hosts are ever contacted.

    Returns:
        Its digest, which costs as much as all the rest.

    Raises:
        ReferenceRefused: says which check failed.
    """
    value = digest(reference)
    if secret is not None:
        if reference.signature is None:
            raise ReferenceRefused("the reference is not signed")
        if not hmac.compare_digest(reference.signature.encode(), _mac(value, secret).encode()):
            raise ReferenceRefused("the signature of the reference is wrong")
    elif not is_loopback(reference.remote_host):
        raise ReferenceRefused("unsigned references are accepted from loopback hosts only")
    if not reference.do_remote_prefill or reference.do_remote_decode:
        raise ReferenceRefused("not a reference to read from")
    if reference.remote_engine_id == own_engine_id:
        raise ReferenceRefused("the reference points at this engine itself")
    _check_shape(reference)
    parse_lease_id(reference.lease_id)
    return value


def is_loopback(host: str) -> bool:
    """Whether `host` can only mean this machine."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _mac(value: bytes, secret: bytes) -> str:
    return hmac.new(secret, value, hashlib.sha256).hexdigest()


def _check_shape(reference: KvReference) -> None:
    if reference.tp_size != 1:
        raise ReferenceRefused(f"tp_size {reference.tp_size} is not supported")
    if not 0 < reference.remote_port < 1 << 16:
        raise ReferenceRefused(f"remote_port {reference.remote_port} is no port")
    if not reference.lease_ttl_s > 0:
        raise ReferenceRefused("the lease has expired")
    if reference.block_size < 1 or reference.remote_num_tokens < 1:
        raise ReferenceRefused("block_size and remote_num_tokens must be positive")
    if reference.remote_num_tokens > len(reference.prompt_token_ids):
        raise ReferenceRefused("remote_num_tokens exceeds the prompt")
    num_blocks = -(-reference.remote_num_tokens // reference.block_size)
    if len(reference.remote_block_ids) != num_blocks:
        raise ReferenceRefused(f"{len(reference.remote_block_ids)} blocks do not hold {num_blocks} blocks of tokens")
    if len(set(reference.remote_block_ids)) != num_blocks or min(reference.remote_block_ids) < 0:
        raise ReferenceRefused("remote_block_ids are negative or repeat")

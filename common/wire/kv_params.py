"""`kv_transfer_params`, in vLLM's dialect plus our own fields (journey rows 4 and 5).

Owns: the three things the field can mean and their JSON. The only place where it is a mapping.
Does not know: signatures' secrets (kv_transfer.reference), NIXL, HTTP.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from common.errors import InvalidRequest
from common.ids import BlockId, EngineId, LeaseId, RequestId

FIELD = "kv_transfer_params"


class PrefillAsk(msgspec.Struct, frozen=True, kw_only=True):
    """Proxy → P: keep the KV and hand it over (`do_remote_decode: true`).

    `constraint="ignore"` means: render the prompt with the constraint's fields, but compile and enforce nothing.
    `decode_fields` are body fields as the client wrote them that this leg had to change (`max_tokens`, `n`, …): P
    checks them as D will, so that a request D must refuse is refused before any prefill.
    """

    constraint: str | None = None
    decode_fields: Mapping[str, Any] = {}


class KvReference(msgspec.Struct, frozen=True, kw_only=True):
    """P → proxy → D: where the KV of one request lies and how long it is held (`do_remote_prefill: true`).

    Field names are vLLM 0.32's where it has them; `lease_id`, `lease_ttl_s`, `block_size`, `prompt_token_ids` and
    `signature` are ours. `remote_host`/`remote_port` is P's HTTP address (vLLM: its ZMQ side channel).
    `remote_num_tokens` counts the prompt tokens whose KV the blocks hold. `lease_ttl_s` is remaining seconds, as all
    durations between processes.
    """

    remote_engine_id: EngineId
    remote_request_id: RequestId
    remote_host: str
    remote_port: int
    remote_block_ids: tuple[BlockId, ...]
    remote_num_tokens: int
    block_size: int
    lease_id: LeaseId
    lease_ttl_s: float
    prompt_token_ids: tuple[int, ...]
    tp_size: int = 1
    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    signature: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The mapping that travels in a response or request body."""
        result: dict[str, Any] = msgspec.to_builtins(self)
        return result


def parse(value: Mapping[str, Any] | None) -> PrefillAsk | KvReference | None:
    """What a request body's `kv_transfer_params` asks for; None when absent, null, empty or asking for nothing.

    Raises:
        InvalidRequest: both directions at once, or a reference with missing or mistyped fields.
    """
    if not value:
        return None
    wants_decode, wants_prefill = value.get("do_remote_decode") is True, value.get("do_remote_prefill") is True
    if wants_decode and wants_prefill:
        raise InvalidRequest("do_remote_decode and do_remote_prefill exclude each other", param=FIELD)
    if wants_decode:
        constraint = value.get("constraint")
        if constraint not in (None, "ignore"):
            message = f"constraint must be 'ignore' or absent, not {constraint!r}"
            raise InvalidRequest(message, param=f"{FIELD}.constraint")
        decode_fields = value.get("decode_fields") or {}
        if not isinstance(decode_fields, Mapping):
            raise InvalidRequest("decode_fields must be an object", param=f"{FIELD}.decode_fields")
        return PrefillAsk(constraint=constraint, decode_fields=decode_fields)
    if not wants_prefill:
        return None
    try:
        return msgspec.convert(dict(value), KvReference, strict=True)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"not a KV reference: {error}", param=FIELD) from error

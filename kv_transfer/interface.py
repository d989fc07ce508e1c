"""The values that cross kv_transfer's border: orders, outcomes, settings.

Owns: the types that `prefill.handoff` and `decode.remote_kv` see (journey rows 4 and 7).
Does not know: NIXL, the engine.
"""

from dataclasses import dataclass
from enum import Enum

from common.ids import BlockId, EngineId, RequestId
from common.wire.kv_params import KvReference
from kv_transfer.compatibility import Fingerprint


class FailureCause(Enum):
    """Why KV did not move; the value is the metric label."""

    HANDSHAKE_FAILED = "handshake_failed"
    INCOMPATIBLE = "incompatible"
    REFUSED = "refused"
    DISCONNECTED = "disconnected"
    TIMEOUT = "timeout"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a pull or a handshake cannot succeed."""

    cause: FailureCause
    reason: str


class ReleaseCause(Enum):
    """Why a lease ended; the value is the metric label."""

    READ = "read"
    ABORTED = "aborted"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class TransferStatus(Enum):
    """How a pull ended; `LATE` is no end: its time is over, and its blocks are still being written."""

    LATE = "late"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOrder:
    """Read tokens `[start_token, end_token)` of a remote prompt into local blocks.

    `start_token` is a multiple of the local block size; `block_ids[i]` receives local block
    `start_token // block_size + i`.
    """

    request_id: RequestId
    reference: KvReference
    start_token: int
    end_token: int
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOutcome:
    """The end of one pull: from now on nothing writes into its blocks any more.

    After `LATE`, which comes at most once, something may; a last outcome (`CANCELLED`) follows when that is over.
    """

    request_id: RequestId
    status: TransferStatus
    cause: FailureCause | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineIdentity:
    """Which process this is, and what its KV means."""

    engine_id: EngineId
    fingerprint: Fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerSettings:
    """P's side.

    Attributes:
        host: under which D reaches P's HTTP port.
        port: that port.
        secret: signs references and handshakes; None leaves them unsigned (loopback only).
        lease_ttl_s: how long blocks are held without a heartbeat.
        max_leases: most leases at a time; one more raises `QueueFull`.
    """

    host: str
    port: int
    secret: bytes | None = None
    lease_ttl_s: float = 30.0
    max_leases: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSettings:
    """D's side.

    Attributes:
        secret: verifies references; None accepts unsigned ones, and then only from loopback hosts.
        handshake_timeout_s: from the first connect to the first bytes read from the peer.
        pull_timeout_s: from `start_pull` to the last byte confirmed.
        peer_ttl_s: a peer unused this long is forgotten.
        peer_backoff_s: how long a failed handshake answers for the next one.
        max_pulls: most pulls that read at the same time; more wait.
    """

    secret: bytes | None = None
    handshake_timeout_s: float = 5.0
    pull_timeout_s: float = 30.0
    peer_ttl_s: float = 600.0
    peer_backoff_s: float = 0.5
    max_pulls: int = 1024

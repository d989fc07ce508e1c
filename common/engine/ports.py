"""What the engine asks of the world: protocols that a role's `main.py` fills in.

Owns: the border. Every method here is called on the step-loop thread and returns at once; long work happens in the
implementer's own thread or process, which calls the engine's `wake()` when something is ready to be polled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from common.ids import BlockId, LeaseId, RequestId
from common.wire.kv_params import KvReference


@dataclass(frozen=True, slots=True, kw_only=True)
class PullPlan:
    """Which tokens of a remote prompt to read, and into which local blocks.

    Tokens `[start_token, end_token)` of the prompt; `start_token` is a multiple of the local block size (everything
    before it was found in the local prefix cache). `block_ids[i]` receives local block `start_token // block_size + i`.
    """

    request_id: RequestId
    reference: KvReference
    start_token: int
    end_token: int
    block_ids: tuple[BlockId, ...]
    block_size: int


class PullStatus(Enum):
    """How a pull ended. Only after one of these but `LATE` may its blocks be used or freed.

    `LATE` says that its time is over while bytes may still land: the request need not wait any longer, its blocks must.
    It comes at most once, and a last status follows when the transport has ended.
    """

    LATE = "late"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOutcome:
    """How one pull stands; when it failed or is late, `cause` is a short stable word and `reason` a sentence."""

    request_id: RequestId
    status: PullStatus
    cause: str | None = None
    reason: str | None = None


class KVSource(Protocol):
    """D's side of KV transfer (journey rows 6, 7). Implemented by `decode.remote_kv`."""

    def expect(self, request_id: RequestId, reference: KvReference) -> None:
        """The request is known here: keep P's lease alive (and shake hands) while it waits for its grammar or room."""
        ...

    def start_pull(self, plan: PullPlan) -> None:
        """Begin reading. The plan's blocks stay reserved until `poll` reports its outcome."""
        ...

    def cancel(self, request_id: RequestId) -> None:
        """Stop a running pull as soon as the transport allows; its outcome still comes."""
        ...

    def abandon(self, request_id: RequestId) -> None:
        """The request will never pull (ended, full prefix hit, recompute): tell P to release. Idempotent."""
        ...

    def poll(self) -> Sequence[PullOutcome]:
        """Outcomes since the last call."""
        ...


class KVSink(Protocol):
    """P's side (journey row 4). Implemented by `prefill.handoff`."""

    def hand_off(
        self, request_id: RequestId, block_ids: Sequence[BlockId], prompt_token_ids: Sequence[int]
    ) -> KvReference:
        """Pin the blocks under a new lease and say where they are; the engine keeps a reference to each for it."""
        ...

    def give_up(self, request_id: RequestId) -> None:
        """Nobody got what `hand_off` returned for this request: end its lease. Unknown requests are fine."""
        ...

    def poll_released(self) -> Sequence[LeaseId]:
        """Leases that ended (read, abandoned, expired) since the last call, each exactly once."""
        ...

"""D's way to remote KV: the engine's port onto `kv_transfer.consumer` (journey rows 6 and 7).

Owns: the translation between the engine's plans and outcomes and the transfer's. What a failed pull means for its
request (recompute or fail) is the scheduler's policy.
Does not know: references' checks, handshakes, reads.
"""

from collections.abc import Callable, Sequence

from common.engine.ports import PullOutcome, PullPlan, PullStatus
from common.ids import RequestId
from common.wire.kv_params import KvReference
from kv_transfer.consumer import KVConsumer
from kv_transfer.interface import PullOrder, TransferOutcome, TransferStatus

_STATUS = {
    TransferStatus.LATE: PullStatus.LATE,
    TransferStatus.DONE: PullStatus.DONE,
    TransferStatus.FAILED: PullStatus.FAILED,
    TransferStatus.CANCELLED: PullStatus.CANCELLED,
}


class RemoteKV:
    """Implements `common.engine.ports.KVSource`.

    Args:
        consumer: pulls and leases.
        wake: the engine's `wake`, called on the transfer driver's thread when `poll` has something.
    """

    def __init__(self, consumer: KVConsumer, wake: Callable[[], None]) -> None:
        self._consumer = consumer
        consumer.on_outcome(wake)

    def expect(self, request_id: RequestId, reference: KvReference) -> None:
        """Shake hands and keep P's lease alive; nothing is read."""
        self._consumer.expect(request_id, reference)

    def start_pull(self, plan: PullPlan) -> None:
        """Begin reading into the plan's blocks."""
        self._consumer.start_pull(
            PullOrder(
                request_id=plan.request_id,
                reference=plan.reference,
                start_token=plan.start_token,
                end_token=plan.end_token,
                block_ids=plan.block_ids,
            )
        )

    def cancel(self, request_id: RequestId) -> None:
        """Stop; the outcome still comes, once nothing writes into the blocks."""
        self._consumer.cancel(request_id)

    def abandon(self, request_id: RequestId) -> None:
        """Tell P to release: this request will never pull. Idempotent."""
        self._consumer.abandon(request_id)

    def dismiss(self, reference: KvReference) -> None:
        """Tell P to release: D refused the request before the engine knew it. Any thread."""
        self._consumer.dismiss(reference)

    def poll(self) -> Sequence[PullOutcome]:
        """Outcomes since the last call."""
        return [_outcome(outcome) for outcome in self._consumer.poll()]


def _outcome(outcome: TransferOutcome) -> PullOutcome:
    return PullOutcome(
        request_id=outcome.request_id,
        status=_STATUS[outcome.status],
        cause=outcome.cause.value if outcome.cause else None,
        reason=outcome.reason,
    )

"""D's gate for KV references: believed only after their signature and bounds were checked (journey row 5).

Owns: what happens with a reference that must not be used (policy), and telling P about requests D refuses.
Does not know: how they are signed or read.
"""

from collections.abc import Iterable

import structlog

from common.engine.settings import PullFailurePolicy
from common.errors import ReferenceRefused
from common.ids import EngineId
from common.telemetry import metrics
from common.telemetry.metrics import Reading
from common.wire.kv_params import KvReference
from decode.remote_kv import RemoteKV
from kv_transfer import reference as references

_log = structlog.get_logger(__name__)


class ReferenceGate:
    """Implements `common.serving.ports.References`. Event loop only.

    Args:
        remote_kv: the way to tell P.
        engine_id: this engine's own.
        secret: what signatures are checked with; None accepts unsigned references from loopback hosts.
        policy: `recompute` serves the request from its prompt, `fail` refuses it.
    """

    def __init__(
        self, remote_kv: RemoteKV, engine_id: EngineId, secret: bytes | None, policy: PullFailurePolicy
    ) -> None:
        self._remote_kv = remote_kv
        self._engine_id = engine_id
        self._secret = secret
        self._policy = policy
        self._num_recomputed = 0

    def admit(self, reference: KvReference) -> KvReference | None:
        """See `References`."""
        try:
            references.check(reference, self._secret, self._engine_id)
        except ReferenceRefused as error:
            _log.warning("kv_reference.refused", reason=str(error), policy=self._policy)
            if self._policy == "fail":
                raise
            self._num_recomputed += 1
            return None
        return reference

    def refuse(self, reference: KvReference) -> None:
        """See `References`."""
        self._remote_kv.dismiss(reference)

    def readings(self) -> Iterable[Reading]:
        """A metrics source: prompts computed here because their reference was no good."""
        return [Reading(metrics.FALLBACK, self._num_recomputed, ("reference_not_valid",))]

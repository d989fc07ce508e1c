"""Failure class x leg x what is left → what to do next: one table, pure.

Owns: the decision. Does not know: HTTP, engines, clocks; whoever asks has counted and looked around.
Only asked while no byte has reached the client; after that nothing is ever tried again.
"""

from dataclasses import dataclass
from enum import Enum

from common.errors import UpstreamError, UpstreamTimeout, UpstreamUnreachable
from proxy.upstream import EngineRefused


class Leg(Enum):
    """Which leg failed."""

    PREFILL = "prefill"
    DECODE = "decode"


class Failure(Enum):
    """How it failed."""

    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    BROKEN = "broken"
    BUSY = "busy"
    UNAVAILABLE = "unavailable"
    SERVER_ERROR = "server_error"
    REFUSED = "refused"


class Decision(Enum):
    """What happens next."""

    OTHER_ENGINE = "other_engine"
    SAME_ENGINE = "same_engine"
    WITHOUT_PREFILL = "without_prefill"
    ANSWER = "answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What the decision depends on.

    Attributes:
        num_tries_left: further legs the policy allows.
        has_other_engine: whether an engine of the role is routable that this request has not tried.
        has_time: whether the request's deadline leaves room.
        may_skip_prefill: policy `on_prefill_failure: local`.
    """

    num_tries_left: int
    has_other_engine: bool
    has_time: bool
    may_skip_prefill: bool


_MAY_MOVE = set(Failure) - {Failure.REFUSED}
# A kept-alive connection that the engine closed in the same moment looks like this; a fresh one may well work.
_MAY_REPEAT = {Failure.BROKEN}
# An overloaded P is no reason to pile its work on D: the client is told to come back.
_MAY_SKIP = _MAY_MOVE - {Failure.BUSY}

_BUSY_STATUSES = (408, 429)
_UNAVAILABLE_STATUS = 503


def decide(leg: Leg, failure: Failure, situation: Situation) -> Decision:
    """The next step; a refused request (4xx) is never tried anywhere else."""
    if failure is Failure.REFUSED or not situation.has_time:
        return Decision.ANSWER
    if situation.num_tries_left > 0:
        if failure in _MAY_MOVE and situation.has_other_engine:
            return Decision.OTHER_ENGINE
        if failure in _MAY_REPEAT:
            return Decision.SAME_ENGINE
    if leg is Leg.PREFILL and failure in _MAY_SKIP and situation.may_skip_prefill:
        return Decision.WITHOUT_PREFILL
    return Decision.ANSWER


def failure_of_status(status: int) -> Failure | None:
    """The class of an engine's status; None for a success."""
    if status < 400:
        return None
    if status in _BUSY_STATUSES:
        return Failure.BUSY
    if status == _UNAVAILABLE_STATUS:
        return Failure.UNAVAILABLE
    return Failure.REFUSED if status < 500 else Failure.SERVER_ERROR


def failure_of(error: UpstreamError) -> Failure:
    """The class of a failed leg."""
    if isinstance(error, EngineRefused):
        return failure_of_status(error.answer.status) or Failure.BROKEN
    if isinstance(error, UpstreamUnreachable):
        return Failure.UNREACHABLE
    return Failure.TIMEOUT if isinstance(error, UpstreamTimeout) else Failure.BROKEN


def counts_against_engine(failure: Failure) -> bool:
    """Whether the breaker hears of it: never for what the client did wrong, nor for honest overload."""
    return failure not in (Failure.REFUSED, Failure.BUSY, Failure.UNAVAILABLE)

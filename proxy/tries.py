"""Runs one leg, on as many engines as the retry table allows.

Owns: the loop, and telling breaker and metrics what happened. Does not know: what a leg does.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from common.errors import UpstreamError
from proxy.call import Call
from proxy.fleet.worker import Role, Worker
from proxy.retry import Decision, Failure, Leg, Situation, counts_against_engine, decide, failure_of
from proxy.services import Services

T = TypeVar("T")

_log = structlog.get_logger(__name__)
_ROLES = {Leg.PREFILL: Role.PREFILL, Leg.DECODE: Role.DECODE}


class Tries:
    """The tries of one request.

    Args:
        call: the request.
        services: fleet, policy, metrics.
    """

    def __init__(self, call: Call, services: Services) -> None:
        self._call = call
        self._services = services
        self.num_retries = 0

    async def run(self, leg: Leg, worker: Worker, send: Callable[[Worker], Awaitable[T]]) -> T | None:
        """The result of `send(worker)`, on `worker` or another one; None when a prefill leg is to be done without.

        Raises:
            UpstreamError: the failure that the table says to answer with.
        """
        retries = self._services.config.retries
        tried = [worker]
        num_left = (retries.prefill_tries if leg is Leg.PREFILL else retries.decode_tries) - 1
        while True:
            worker.breaker.on_sent()
            try:
                result = await send(worker)
            except UpstreamError as error:
                failure = failure_of(error)
                self._record(leg, worker, failure)
                other = self._services.pick(_ROLES[leg], self._call, tried)
                decision = decide(leg, failure, self._situation(num_left, other))
                if decision is Decision.WITHOUT_PREFILL:
                    return None
                if decision is Decision.ANSWER:
                    raise
                if decision is Decision.OTHER_ENGINE and other is not None:
                    worker = other
                    tried.append(worker)
                num_left -= 1
                self.num_retries += 1
                self._services.metrics.retries.inc(leg.value, failure.value)
            else:
                worker.breaker.on_success()
                self._services.metrics.legs.inc(leg.value, "ok")
                return result

    def _situation(self, num_left: int, other: Worker | None) -> Situation:
        return Situation(
            num_tries_left=num_left,
            has_other_engine=other is not None,
            has_time=not self._call.deadline.has_passed(),
            may_skip_prefill=self._services.config.retries.on_prefill_failure == "local",
        )

    def _record(self, leg: Leg, worker: Worker, failure: Failure) -> None:
        self._services.metrics.legs.inc(leg.value, failure.value)
        if failure is Failure.REFUSED:
            worker.breaker.on_success()
            return
        if counts_against_engine(failure):
            worker.breaker.on_failure()
        _log.warning(
            "leg.failed", leg=leg.value, engine=worker.name, cause=failure.value, request_id=self._call.request_id
        )

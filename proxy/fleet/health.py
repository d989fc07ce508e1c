"""Probes: asks every engine's `/ready` and moves its health (STARTING, READY, DEAD).

Owns: when a probe counts, and the loop, which slows down while all are well and idle.
Does not know: what comes of real traffic (that is the breaker's).
"""

import asyncio

import msgspec
import structlog

from common.errors import UpstreamError, UpstreamUnreachable
from proxy.config import FleetConfig
from proxy.fleet.membership import Fleet
from proxy.fleet.worker import Worker, WorkerState
from proxy.upstream import Upstream

_log = structlog.get_logger(__name__)
_NO_SUCH_PATH = (404, 405, 501)


class _ModelList(msgspec.Struct):
    data: tuple[msgspec.Raw, ...] = ()


class Monitor:
    """Watches the fleet.

    Args:
        fleet: whom to watch; members added later are watched too.
        upstream: how to ask.
        config: pause, timeout, thresholds.
        headers: sent with every probe (the engines' key).
    """

    def __init__(self, fleet: Fleet, upstream: Upstream, config: FleetConfig, headers: dict[str, str]) -> None:
        self._fleet = fleet
        self._upstream = upstream
        self._config = config
        self._headers = headers
        self._failures: dict[Worker, int] = {}
        self._refusing: set[Worker] = set()

    async def run(self) -> None:
        """Probe until cancelled; one slow engine delays nobody else's verdict."""
        busy: dict[Worker, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                members = self._fleet.all()
                self._failures = {w: n for w, n in self._failures.items() if w in members}
                busy = {worker: task for worker, task in busy.items() if not task.done()}
                for worker in members:
                    if worker not in busy:
                        busy[worker] = group.create_task(self.probe(worker))
                is_calm = all(map(self._is_calm, members))
                config = self._config
                pause_s = config.calm_probe_interval_s if is_calm else config.probe_interval_s
                await self._fleet.wait_for_newcomer(pause_s)

    def _is_calm(self, worker: Worker) -> bool:
        """Whether it is well and idle: nobody is hurt if it is found dead a moment later."""
        settled = worker.state in (WorkerState.READY, WorkerState.DRAINING)
        is_trusted = not self._failures.get(worker) and worker.breaker.allows() and not worker.breaker.is_suspect
        return settled and worker.num_legs == 0 and is_trusted

    async def probe(self, worker: Worker) -> None:
        """Ask once and judge."""
        was_suspect = worker.breaker.is_suspect
        try:
            async with asyncio.timeout(self._config.probe_timeout_s):
                is_ready = await self._ask_ready(worker)
        except UpstreamUnreachable:
            self._on_bad(worker, at_once=True)
        except (UpstreamError, TimeoutError):
            self._on_bad(worker, at_once=False)
        else:
            if is_ready:
                if was_suspect:
                    worker.breaker.on_probed()
                await self._on_good(worker)
            else:
                self._on_bad(worker, at_once=True)

    async def _ask_ready(self, worker: Worker) -> bool:
        answer = await self._upstream.get(worker, "/ready", self._headers)
        if answer.status in _NO_SUCH_PATH:
            # vLLM has no /ready; its /health answers once it can serve.
            answer = await self._upstream.get(worker, "/health", self._headers)
        refuses_key = answer.status in (401, 403)
        if refuses_key and worker not in self._refusing:
            _log.error("engine.refuses_key", engine=worker.name, status=answer.status)
        (self._refusing.add if refuses_key else self._refusing.discard)(worker)
        return answer.status == 200

    async def _on_good(self, worker: Worker) -> None:
        self._failures[worker] = 0
        if worker.state in (WorkerState.READY, WorkerState.DRAINING):
            return
        await self._learn_models(worker)
        # A drain may have begun while the list of models was on its way.
        if worker.state in (WorkerState.STARTING, WorkerState.DEAD):
            worker.move_to(WorkerState.READY)
            worker.breaker.on_success()
            _log.info("engine.ready", engine=worker.name, role_of_engine=worker.role.value)

    def _on_bad(self, worker: Worker, *, at_once: bool) -> None:
        self._failures[worker] = self._failures.get(worker, 0) + 1
        is_enough = at_once or self._failures[worker] >= self._config.failures_until_dead
        if is_enough and worker.state is WorkerState.READY:
            worker.move_to(WorkerState.DEAD)
            _log.warning("engine.dead", engine=worker.name, role_of_engine=worker.role.value)

    async def _learn_models(self, worker: Worker) -> None:
        try:
            async with asyncio.timeout(self._config.probe_timeout_s):
                answer = await self._upstream.get(worker, "/v1/models", self._headers)
            if answer.status == 200:
                worker.models = tuple(bytes(raw) for raw in msgspec.json.decode(answer.body, type=_ModelList).data)
        except (UpstreamError, TimeoutError, msgspec.MsgspecError):
            _log.warning("engine.models_unknown", engine=worker.name)

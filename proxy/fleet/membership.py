"""The set of engines, by role.

Owns: who belongs to the fleet and the questions routing asks of it. Does not know: probes, policies, HTTP.
"""

import asyncio
import ssl
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from enum import Enum

from common.clock import Clock
from proxy.config import FleetConfig
from proxy.fleet.breaker import Breaker
from proxy.fleet.worker import Role, Worker, WorkerState


class Source(Enum):
    """Who brought a worker into the fleet; each source takes away only its own."""

    CONFIG = "config"
    FILE = "file"
    SRV = "srv"
    KUBERNETES = "kubernetes"
    ADMIN = "admin"


class Fleet:
    """Workers of both roles.

    Args:
        config: static lists and breaker settings.
        clock: for the breakers.
        tls: for engines behind https; None uses the machine's certificates.
        on_death: called with every worker that is found dead.
    """

    def __init__(
        self,
        config: FleetConfig,
        clock: Clock,
        tls: ssl.SSLContext | None = None,
        on_death: Callable[[Worker], None] = lambda _: None,
    ) -> None:
        self._on_death = on_death
        self._tls = tls
        self._sources: dict[Worker, Source] = {}
        self._config = config
        self._clock = clock
        self._workers: dict[Role, dict[str, Worker]] = {role: {} for role in Role}
        self._ready = asyncio.Event()
        self._grown = asyncio.Event()
        self.apply(Source.CONFIG, {Role.PREFILL: config.prefill, Role.DECODE: config.decode})

    def apply(self, source: Source, urls: Mapping[Role, Iterable[str]]) -> None:
        """Make the workers of `source` be exactly `urls`; running legs of those that go are not disturbed."""
        for role in Role:
            wanted = dict.fromkeys(url.rstrip("/") for url in urls.get(role, ()))
            for url, worker in list(self._workers[role].items()):
                if self._sources[worker] is source and url not in wanted:
                    self.remove(role, url)
            for url in wanted:
                self.add(role, url, source)

    def add(self, role: Role, url: str, source: Source = Source.CONFIG) -> Worker:
        """Take `url` into the fleet (or find it there); it starts in STARTING."""
        known = self._workers[role]
        key = url.rstrip("/")
        if key not in known:
            breaker = Breaker(self._clock, self._config.breaker_failures, self._config.breaker_cooldown_s)
            worker = known[key] = Worker(role, key, breaker, on_move=self._on_move, tls=self._tls)
            self._sources[worker] = source
            self._grown.set()
            self._on_change()
        return known[key]

    def remove(self, role: Role, url: str) -> Worker | None:
        """Forget `url`; its running legs go on."""
        gone = self._workers[role].pop(url.rstrip("/"), None)
        if gone is not None:
            del self._sources[gone]
        self._on_change()
        return gone

    def find(self, role: Role, url: str) -> Worker | None:
        """The worker at `url`."""
        return self._workers[role].get(url.rstrip("/"))

    def of(self, role: Role) -> Iterable[Worker]:
        """Every worker of `role`, in whatever health."""
        return self._workers[role].values()

    def all(self) -> list[Worker]:
        """Every worker."""
        return [worker for role in Role for worker in self._workers[role].values()]

    def routable(self, role: Role, excluded: Collection[Worker] = ()) -> list[Worker]:
        """Workers that a leg may go to now; suspects only where there are no others."""
        able = [worker for worker in self._workers[role].values() if worker.is_routable and worker not in excluded]
        return able if len(able) < 2 else [worker for worker in able if not worker.breaker.is_suspect] or able

    def is_starting(self, role: Role) -> bool:
        """Whether no worker of `role` has ever been ready."""
        return all(worker.state is WorkerState.STARTING for worker in self._workers[role].values())

    def is_ready(self) -> bool:
        """Whether both roles have a worker in READY."""
        return self._ready.is_set()

    async def wait_ready(self) -> None:
        """Return when `is_ready` holds."""
        await self._ready.wait()

    async def wait_for_newcomer(self, within_s: float) -> None:
        """Return when somebody joins, or after `within_s`."""
        self._grown.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._grown.wait()

    def _on_change(self) -> None:
        if all(any(w.state is WorkerState.READY for w in self._workers[role].values()) for role in Role):
            self._ready.set()
        else:
            self._ready.clear()

    def _on_move(self, worker: Worker) -> None:
        self._on_change()
        if worker.state is WorkerState.DEAD:
            self._on_death(worker)

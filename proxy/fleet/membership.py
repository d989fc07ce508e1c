"""The set of engines, by role.

Owns: who belongs to the fleet and the questions routing asks of it. Does not know: probes, policies, HTTP.
"""

import asyncio
from collections.abc import Collection, Iterable

from common.clock import Clock
from proxy.config import FleetConfig
from proxy.fleet.breaker import Breaker
from proxy.fleet.worker import Role, Worker, WorkerState


class Fleet:
    """Workers of both roles.

    Args:
        config: static lists and breaker settings.
        clock: for the breakers.
    """

    def __init__(self, config: FleetConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._workers: dict[Role, dict[str, Worker]] = {role: {} for role in Role}
        self._ready = asyncio.Event()
        for role, urls in ((Role.PREFILL, config.prefill), (Role.DECODE, config.decode)):
            for url in urls:
                self.add(role, url)

    def add(self, role: Role, url: str) -> Worker:
        """Take `url` into the fleet (or find it there); it starts in STARTING."""
        known = self._workers[role]
        key = url.rstrip("/")
        if key not in known:
            breaker = Breaker(self._clock, self._config.breaker_failures, self._config.breaker_cooldown_s)
            known[key] = Worker(role, key, breaker, self._on_move)
            self._on_move()
        return known[key]

    def remove(self, role: Role, url: str) -> Worker | None:
        """Forget `url`; its running legs go on."""
        gone = self._workers[role].pop(url.rstrip("/"), None)
        self._on_move()
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
        """Workers that a leg may go to now."""
        return [worker for worker in self._workers[role].values() if worker.is_routable and worker not in excluded]

    def is_starting(self, role: Role) -> bool:
        """Whether no worker of `role` has ever been ready."""
        return all(worker.state is WorkerState.STARTING for worker in self._workers[role].values())

    def is_ready(self) -> bool:
        """Whether both roles have a worker in READY."""
        return all(any(w.state is WorkerState.READY for w in self._workers[role].values()) for role in Role)

    async def wait_ready(self) -> None:
        """Return when `is_ready` holds."""
        await self._ready.wait()

    def _on_move(self) -> None:
        if self.is_ready():
            self._ready.set()
        else:
            self._ready.clear()

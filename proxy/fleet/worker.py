"""One engine as the proxy sees it: address, health, load.

Owns: the health states and their one writer, load accounting.
Does not know: HTTP, probing, how it gets chosen.
"""

import ssl
from collections.abc import Callable
from enum import Enum
from urllib.parse import urlsplit

from common.state_machine import Transitions
from proxy.fleet.breaker import Breaker
from proxy.fleet.recent_keys import RecentKeys
from proxy.http1.pool import Origin

_MAX_WARMED = 256
"""Constraints an engine is taken to have compiled still; fewer than any engine's cache holds of usual ones."""


class Role(Enum):
    """Which leg an engine serves."""

    PREFILL = "prefill"
    DECODE = "decode"

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is slower by a Python call


class WorkerState(Enum):
    """Health of an engine."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is slower by a Python call


HEALTH = Transitions(
    {
        WorkerState.STARTING: {WorkerState.READY, WorkerState.DRAINING},
        WorkerState.READY: {WorkerState.DEAD, WorkerState.DRAINING},
        WorkerState.DEAD: {WorkerState.READY, WorkerState.DRAINING},
        # Put back by an operator: it has to prove itself again.
        WorkerState.DRAINING: {WorkerState.STARTING},
    }
)


class Worker:
    """One engine.

    Args:
        role: which leg it serves.
        url: base URL, without a trailing slash.
        breaker: fed by its legs.
        on_move: called after every change of health.
        tls: for https; None uses the machine's certificates.

    Attributes:
        num_legs: legs under way.
        outstanding_bytes: sum of their bodies.
        warmed: constraints it has compiled lately; nothing once it was found dead.
    """

    def __init__(
        self,
        role: Role,
        url: str,
        breaker: Breaker,
        *,
        on_move: Callable[["Worker"], None] = lambda _: None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.role = role
        parts = urlsplit(url)
        tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        self.url = url.rstrip("/")
        self.name = parts.netloc
        self.prefix = parts.path.rstrip("/")
        self.origin = Origin(parts.hostname or "", parts.port or (80 if tls is None else 443), tls)
        self.breaker = breaker
        self.state = WorkerState.STARTING
        self.num_legs = 0
        self.outstanding_bytes = 0
        self.warmed = RecentKeys(_MAX_WARMED)
        self.models: tuple[bytes, ...] = ()
        self._on_move = on_move

    @property
    def is_routable(self) -> bool:
        """Whether a new leg may be sent to it."""
        return self.state is WorkerState.READY and self.breaker.allows()

    def move_to(self, state: WorkerState) -> None:
        """Change health.

        Raises:
            IllegalTransition: the table has no such move.
        """
        HEALTH.check(self.state, state)
        self.state = state
        if state is WorkerState.DEAD:
            self.warmed.clear()
        self._on_move(self)

    def load(self, num_bytes: int) -> None:
        """One more leg, of a body of `num_bytes`; whoever calls this calls `unload` with the same number."""
        self.num_legs += 1
        self.outstanding_bytes += num_bytes

    def unload(self, num_bytes: int) -> None:
        """The leg is over."""
        self.num_legs -= 1
        self.outstanding_bytes -= num_bytes

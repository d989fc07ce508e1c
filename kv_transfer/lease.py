"""P's holds on blocks that D will read: HELD until read, aborted, cancelled or expired, and released exactly once.

Journey rows 4 to 7. Owns: the life of every lease and its guard word. Thread-safe: the step loop holds, the driver
renews and expires, the HTTP side cancels.
Does not know: notifications, NIXL, the block pool (the engine frees the blocks of each drained lease).
"""

import heapq
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from common.clock import Clock
from common.ids import LeaseId, RequestId
from common.state_machine import Transitions
from kv_transfer.guard import GuardTable
from kv_transfer.interface import ReleaseCause
from kv_transfer.reference import GENERATION_BYTES, lease_id

REMEMBERED_CANCELS = 8192
"""Most cancellations of requests without a lease that are kept; the oldest goes first."""


class LeaseState(Enum):
    """Where a lease stands."""

    HELD = "held"
    RELEASED = "released"
    EXPIRED = "expired"


LEASE_TRANSITIONS = Transitions(
    {
        LeaseState.HELD: {LeaseState.RELEASED, LeaseState.EXPIRED},
        LeaseState.RELEASED: set(),
        LeaseState.EXPIRED: set(),
    }
)


@dataclass(slots=True, eq=False)
class Lease:
    """One hold. `move_to` is the one writer of `state`."""

    lease_id: LeaseId
    request_id: RequestId
    slot: int
    generation: bytes
    expires_at_s: float
    state: LeaseState = field(default=LeaseState.HELD)

    def move_to(self, state: LeaseState) -> None:
        """Raise `IllegalTransition` unless the lease is held."""
        LEASE_TRANSITIONS.check(self.state, state)
        self.state = state


class LeaseBook:
    """Every lease of this engine.

    Args:
        guard: the table whose words say which leases live.
        clock: for expiry.
        ttl_s: how long a lease lives without renewal.
    """

    def __init__(self, guard: GuardTable, clock: Clock, ttl_s: float) -> None:
        self._guard = guard
        self._clock = clock
        self._ttl_s = ttl_s
        self._lock = threading.Lock()
        self._held: dict[LeaseId, Lease] = {}
        self._by_request: dict[RequestId, set[LeaseId]] = {}
        self._expiries: list[tuple[float, LeaseId]] = []
        self._cancelled_early: dict[RequestId, float] = {}
        self._released: deque[LeaseId] = deque()
        self._counts = dict.fromkeys(ReleaseCause, 0)

    def hold(self, request_id: RequestId, digest_of: Callable[[LeaseId], bytes]) -> LeaseId:
        """Open a lease. Once this returns, its guard word stands.

        A request that was cancelled before it got here gets a lease that is over already.

        Args:
            request_id: whose blocks; one request may hold several leases.
            digest_of: digest of the reference that will carry this lease id.

        Raises:
            QueueFull: no slot is free.
        """
        with self._lock:
            slot = self._guard.take()
            generation = secrets.token_bytes(GENERATION_BYTES)
            name = lease_id(slot, generation)
            self._guard.write(slot, generation, digest_of(name))
            lease = Lease(name, request_id, slot, generation, self._clock.now_s() + self._ttl_s)
            self._held[name] = lease
            self._by_request.setdefault(request_id, set()).add(name)
            heapq.heappush(self._expiries, (lease.expires_at_s, name))
            self._forget_early_cancels()
            if self._cancelled_early.pop(request_id, None) is not None:
                self._end(lease, LeaseState.RELEASED, ReleaseCause.CANCELLED)
            return name

    def renew(self, name: LeaseId) -> bool:
        """Let the lease live `ttl_s` from now; False when it is over."""
        with self._lock:
            lease = self._held.get(name)
            if lease is None or self._clock.now_s() >= lease.expires_at_s:
                return False
            lease.expires_at_s = self._clock.now_s() + self._ttl_s
            return True

    def release(self, name: LeaseId, cause: ReleaseCause) -> bool:
        """End the lease; False when it is over already (or never was)."""
        with self._lock:
            lease = self._held.get(name)
            if lease is None:
                return False
            self._end(lease, LeaseState.RELEASED, cause)
            return True

    def cancel_request(self, request_id: RequestId) -> int:
        """End every lease of a request; how many.

        With none yet, the cancellation is remembered for one `ttl_s`: it may overtake the engine's own handoff.
        """
        with self._lock:
            names = tuple(self._by_request.get(request_id, ()))
            for name in names:
                self._end(self._held[name], LeaseState.RELEASED, ReleaseCause.CANCELLED)
            if not names:
                self._forget_early_cancels()
                self._cancelled_early.pop(request_id, None)  # so that the oldest stay in front
                if len(self._cancelled_early) >= REMEMBERED_CANCELS:
                    del self._cancelled_early[next(iter(self._cancelled_early))]
                self._cancelled_early[request_id] = self._clock.now_s() + self._ttl_s
            return len(names)

    def release_all(self, cause: ReleaseCause) -> int:
        """End every lease; how many."""
        with self._lock:
            leases = tuple(self._held.values())
            for lease in leases:
                self._end(lease, LeaseState.RELEASED, cause)
            return len(leases)

    def expire(self) -> int:
        """End every lease whose time has passed; how many."""
        with self._lock:
            now_s, num_expired = self._clock.now_s(), 0
            while self._expiries and self._expiries[0][0] <= now_s:
                _, name = heapq.heappop(self._expiries)
                lease = self._held.get(name)
                if lease is None:
                    continue
                if lease.expires_at_s > now_s:  # it was renewed since it was queued
                    heapq.heappush(self._expiries, (lease.expires_at_s, name))
                    continue
                self._end(lease, LeaseState.EXPIRED, ReleaseCause.EXPIRED)
                num_expired += 1
            self._forget_early_cancels()
            return num_expired

    def next_expiry_s(self) -> float | None:
        """Seconds until a lease may expire, or None while none is held. May be early, never late."""
        with self._lock:
            if not self._held or not self._expiries:
                return None
            return max(0.0, self._expiries[0][0] - self._clock.now_s())

    def drain_released(self) -> Sequence[LeaseId]:
        """Leases that ended since the last call, each exactly once."""
        with self._lock:
            drained = tuple(self._released)
            self._released.clear()
            return drained

    @property
    def num_held(self) -> int:
        """Leases that live."""
        return len(self._held)

    def num_released(self) -> dict[ReleaseCause, int]:
        """Leases that ended, by cause, since the start."""
        with self._lock:
            return dict(self._counts)

    def check_integrity(self) -> None:
        """Raise AssertionError unless slots, leases and requests add up. For tests."""
        with self._lock:
            slots = [lease.slot for lease in self._held.values()]
            by_request = sum(len(names) for names in self._by_request.values())
            if len(set(slots)) != len(slots) or by_request != len(slots) or not all(self._by_request.values()):
                raise AssertionError("leases, slots and requests do not add up")

    def _forget_early_cancels(self) -> None:
        """Drop those whose time has passed; the oldest stand in front."""
        now_s, early = self._clock.now_s(), self._cancelled_early
        while early:
            request_id, until_s = next(iter(early.items()))
            if until_s > now_s:
                return
            del early[request_id]

    def _end(self, lease: Lease, state: LeaseState, cause: ReleaseCause) -> None:
        # The guard word falls first: whoever reads from now on learns that the blocks may change under it.
        self._guard.clear(lease.slot)
        lease.move_to(state)
        del self._held[lease.lease_id]
        names = self._by_request[lease.request_id]
        names.discard(lease.lease_id)
        if not names:
            del self._by_request[lease.request_id]
        self._counts[cause] += 1
        self._released.append(lease.lease_id)

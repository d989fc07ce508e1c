"""Numbers about transfers, as plain frozen values; whoever serves `/metrics` registers them.

Owns: counting. Does not know: Prometheus.
"""

from bisect import bisect_left
from dataclasses import dataclass

from kv_transfer.interface import FailureCause, ReleaseCause

PULL_SECONDS_BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramValue:
    """Counts per bucket: `counts[i]` values are in `(bounds[i - 1], bounds[i]]`, the last is over every bound."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerStats:
    """P's side, since the start; `late_notifications` named a lease that was over already."""

    leases_held: int
    leases_released: dict[ReleaseCause, int]
    late_notifications: int
    unreadable_notifications: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerStats:
    """D's side, since the start."""

    pulls_done: int
    pulls_cancelled: int
    pulls_failed: dict[FailureCause, int]
    pulls_running: int
    expected: int
    bytes_pulled: int
    descriptors: int
    pull_seconds: HistogramValue
    handshakes: int
    handshake_failures: int
    peers_ready: int


class Histogram:
    """Fixed buckets. One writer; readers may see a value half counted, never a wrong type."""

    def __init__(self, bounds: tuple[float, ...] = PULL_SECONDS_BOUNDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def value(self) -> HistogramValue:
        """The counts so far."""
        return HistogramValue(bounds=self._bounds, counts=tuple(self._counts), total=self._total)

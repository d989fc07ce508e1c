"""The proxy's Prometheus metrics (names: DESIGN §7).

Owns: one registry per proxy, every metric's name, labels and help. Does not know: where the numbers come from.
Counting is plain arithmetic on the request's way; Prometheus' types are made when somebody scrapes.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from common.telemetry.metrics import FALLBACK, SHORT_BUCKETS_S, STAGE_BUCKETS_S, TTFT, TTFT_BUCKETS_S, TTFT_STAGE

CONTENT_TYPE = CONTENT_TYPE_LATEST
_Watched = tuple[str, Callable[[], float], Callable[[list[float]], float]]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one proxy has counted, as it travels between the processes of `--workers N`.

    Attributes:
        counts: counter → (labels, count) each.
        durations: histogram → (labels, number per bucket, sum in seconds) each.
        gauges: gauge → its value now.
    """

    counts: dict[str, list[tuple[tuple[str, ...], int]]]
    durations: dict[str, list[tuple[tuple[str, ...], list[int], float]]]
    gauges: dict[str, float]


class Tally(Collector):
    """A counter with labels."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...]) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._counts: dict[tuple[str, ...], int] = {}

    def inc(self, *labels: str) -> None:
        """One more."""
        self._counts[labels] = self._counts.get(labels, 0) + 1

    def counts(self) -> list[tuple[tuple[str, ...], int]]:
        """All of it."""
        return list(self._counts.items())

    def add(self, counts: Iterable[tuple[tuple[str, ...], int]]) -> None:
        """What another one counted."""
        for labels, count in counts:
            self._counts[labels] = self._counts.get(labels, 0) + count

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, count in self._counts.items():
            family.add_metric(labels, count)
        yield family


class DurationRow:
    """One histogram of seconds, without a name."""

    __slots__ = ("_bounds_s", "counts", "sum_s")

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self._bounds_s = bounds_s
        self.counts = [0] * (len(bounds_s) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """One duration."""
        self.counts[bisect_left(self._bounds_s, seconds)] += 1
        self.sum_s += seconds

    def add(self, counts: list[int], sum_s: float) -> None:
        """What another one observed."""
        self.counts = [a + b for a, b in zip(self.counts, counts, strict=True)]
        self.sum_s += sum_s


class Durations(Collector):
    """A histogram of seconds with labels."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...], bounds_s: tuple[float, ...]) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._bounds_s = bounds_s
        self._rows: dict[tuple[str, ...], DurationRow] = {}

    def row(self, *labels: str) -> DurationRow:
        """The histogram of these labels; callers may keep it."""
        row = self._rows.get(labels)
        if row is None:
            row = self._rows[labels] = DurationRow(self._bounds_s)
        return row

    def counts(self) -> list[tuple[tuple[str, ...], list[int], float]]:
        """All of it."""
        return [(labels, row.counts, row.sum_s) for labels, row in self._rows.items()]

    def add(self, counts: Iterable[tuple[tuple[str, ...], list[int], float]]) -> None:
        """What another one observed."""
        for labels, more, sum_s in counts:
            self.row(*labels).add(more, sum_s)

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for labels, row in self._rows.items():
            buckets, total = [], 0
            for bound, count in zip((*map(str, self._bounds_s), "+Inf"), row.counts, strict=True):
                total += count
                buckets.append((bound, float(total)))
            family.add_metric(labels, buckets, row.sum_s)
        yield family


class ProxyMetrics:
    """All of them, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._tallies: dict[str, Tally] = {}
        self._histograms: dict[str, Durations] = {}
        self._gauges: dict[str, _Watched] = {}
        self._rows: dict[str, tuple[DurationRow, Mapping[str, DurationRow]]] = {}
        self._ttft = self._durations(TTFT.name, "Request received to first token sent.", TTFT.labels, TTFT_BUCKETS_S)
        self._stages = self._durations(TTFT_STAGE.name, TTFT_STAGE.help, TTFT_STAGE.labels, STAGE_BUCKETS_S)
        lag = self._durations("pd_proxy_loop_lag_seconds", "How late the event loop was, sampled.", (), SHORT_BUCKETS_S)
        self.loop_lag = lag.row()
        self.requests = self._tally("pd_proxy_requests", "Requests ended, by outcome.", "path", "outcome")
        self.legs = self._tally("pd_proxy_legs", "Legs ended, by result.", "leg", "result")
        self.retries = self._tally("pd_proxy_retries", "Legs sent again, by cause.", "leg", "cause")
        self.fallback = self._tally(
            FALLBACK.name.removesuffix("_total"), "Requests served without a prefill leg, by reason.", "reason"
        )
        self.releases = self._tally("pd_proxy_kv_releases", "P told to release KV, by result.", "result")

    def watch(
        self, name: str, text: str, read: Callable[[], float], join: Callable[[list[float]], float] = sum
    ) -> None:
        """A gauge that is read when scraped; `join` makes one value of several processes' values."""
        self._gauges[name] = (text, read, join)
        Gauge(name, text, registry=self._registry).set_function(read)

    def observe_ttft(self, kind: str, ttft_s: float, stages_s: Mapping[str, float]) -> None:
        """Record one request's TTFT and its stages."""
        rows = self._rows.get(kind)
        if rows is None:
            stages = {stage: self._stages.row(stage, kind) for stage in stages_s}
            rows = self._rows[kind] = (self._ttft.row(kind), stages)
        whole, parts = rows
        whole.observe(ttft_s)
        for stage, seconds in stages_s.items():
            # As `observe`, without a call for each of a dozen stages of every request.
            row = parts[stage]
            row.counts[bisect_left(STAGE_BUCKETS_S, seconds) if seconds else 0] += 1
            row.sum_s += seconds

    def snapshot(self) -> Snapshot:
        """Everything as it stands."""
        return Snapshot(
            counts={name: tally.counts() for name, tally in self._tallies.items()},
            durations={name: histogram.counts() for name, histogram in self._histograms.items()},
            gauges={name: read() for name, (_, read, _) in self._gauges.items()},
        )

    def expose(self, others: Iterable[Snapshot] = ()) -> bytes:
        """The text format; `others` are counted in."""
        more = list(others)
        return generate_latest(self._joined(more)._registry if more else self._registry)

    def _joined(self, others: list[Snapshot]) -> "ProxyMetrics":
        joined = ProxyMetrics()
        every = [self.snapshot(), *others]
        for one in every:
            for name, counts in one.counts.items():
                joined._tallies[name].add(counts)
            for name, durations in one.durations.items():
                joined._histograms[name].add(durations)
        for name, (text, _, join) in self._gauges.items():
            value = join([one.gauges[name] for one in every if name in one.gauges])
            joined.watch(name, text, lambda value=value: value)  # type: ignore[misc]  # bound per turn
        return joined

    def _tally(self, name: str, text: str, *labels: str) -> Tally:
        tally = self._tallies[name] = Tally(name, text, labels)
        self._registry.register(tally)
        return tally

    def _durations(self, name: str, text: str, labels: tuple[str, ...], bounds_s: tuple[float, ...]) -> Durations:
        durations = self._histograms[name] = Durations(name, text, labels, bounds_s)
        self._registry.register(durations)
        return durations

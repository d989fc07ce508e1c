"""Prometheus metrics of one process: one registry, the names of DESIGN §7, nothing global.

Owns: the catalogue of shared metrics and the only import of `prometheus_client`. Counts kept elsewhere (engine, KV
transfer) are read at scrape time through sources, so that no hot path touches a metric object.
Does not know: who measures.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from threading import Lock
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from common.errors import Bug

TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0)
STAGE_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, *TTFT_BUCKETS_S[1:])
SHORT_BUCKETS_S = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)


class MetricType(Enum):
    """How values of a metric add up."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    SUMMARY = "summary"  # a sum and a count kept elsewhere; read at scrape time only


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """One metric: its name with the unit in it, what it says, and its label names."""

    name: str
    type: MetricType
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = SHORT_BUCKETS_S


def _counter(name: str, text: str, *labels: str) -> MetricSpec:
    return MetricSpec(name=name, type=MetricType.COUNTER, help=text, labels=labels)


def _gauge(name: str, text: str, *labels: str) -> MetricSpec:
    return MetricSpec(name=name, type=MetricType.GAUGE, help=text, labels=labels)


def _histogram(name: str, text: str, labels: tuple[str, ...], buckets: tuple[float, ...]) -> MetricSpec:
    return MetricSpec(name=name, type=MetricType.HISTOGRAM, help=text, labels=labels, buckets=buckets)


TTFT = _histogram("pd_ttft_seconds", "Request received to first token sent.", ("kind",), TTFT_BUCKETS_S)
TTFT_STAGE = _histogram(
    "pd_ttft_stage_seconds", "One stage of the time to first token; stages add up.", ("stage", "kind"), STAGE_BUCKETS_S
)
REQUESTS = _counter("pd_requests_total", "Answered requests.", "route", "status")
REQUESTS_RUNNING = _gauge("pd_requests_running", "Requests that take part in steps.")
REQUESTS_WAITING = _gauge("pd_requests_waiting", "Requests that wait, by what for.", "state")
KV_BLOCKS_IN_USE = _gauge("pd_kv_blocks_in_use", "KV blocks referenced by requests or leases.")
KV_BLOCKS_TOTAL = _gauge("pd_kv_blocks_total", "KV blocks of the pool.")
LEASES_HELD = _gauge("pd_leases_held", "Handoffs whose KV is held for a reader.")
LEASES_RELEASED = _counter("pd_leases_released_total", "Handoffs that ended, by how.", "cause")
PROMPT_TOKENS = _counter("pd_prompt_tokens_total", "Prompt tokens by where their KV came from.", "source")
GENERATION_TOKENS = _counter("pd_generation_tokens_total", "Output tokens.")
DRAFT_TOKENS = _counter("pd_draft_tokens_total", "Tokens guessed for decodes, by what sampling said.", "result")
PREEMPTIONS = _counter("pd_preemptions_total", "Requests put back to be recomputed for lack of KV blocks.")
KV_PULL_SECONDS = _histogram("pd_kv_pull_seconds", "One KV pull, posted to done.", (), SHORT_BUCKETS_S)
KV_PULL_BYTES = _counter("pd_kv_pull_bytes_total", "Bytes read from P.")
KV_PULL_DESCRIPTORS = _counter("pd_kv_pull_descriptors_total", "Pieces of memory that pulls were made of.")
KV_PULL_FAILURES = _counter("pd_kv_pull_failures_total", "Pulls that failed.", "cause")
KV_HANDSHAKES = _counter("pd_kv_handshakes_total", "First connections to a P.", "event")
KV_PEERS = _gauge("pd_kv_peers_ready", "P engines that can be read from.")
KV_NOTIFICATIONS = _counter("pd_kv_stray_notifications_total", "Messages of D that ended no lease.", "kind")
FALLBACK = _counter("pd_fallback_total", "Prompts computed by D itself though P had been asked.", "reason")
GRAMMAR_COMPILE_SECONDS = _histogram(
    "pd_grammar_compile_seconds", "One grammar compilation.", ("backend", "outcome"), SHORT_BUCKETS_S
)
GRAMMAR_CACHE = _counter("pd_grammar_cache_total", "Look-ups of compiled grammars.", "result")
STEP_SECONDS = MetricSpec(
    name="pd_step_seconds",
    type=MetricType.SUMMARY,
    help="Parts of the steps that computed something.",
    labels=("part",),
)

CATALOGUE = (
    TTFT,
    TTFT_STAGE,
    REQUESTS,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    KV_BLOCKS_IN_USE,
    KV_BLOCKS_TOTAL,
    LEASES_HELD,
    LEASES_RELEASED,
    PROMPT_TOKENS,
    GENERATION_TOKENS,
    DRAFT_TOKENS,
    PREEMPTIONS,
    KV_PULL_SECONDS,
    KV_PULL_BYTES,
    KV_PULL_DESCRIPTORS,
    KV_PULL_FAILURES,
    KV_HANDSHAKES,
    KV_PEERS,
    KV_NOTIFICATIONS,
    FALLBACK,
    GRAMMAR_COMPILE_SECONDS,
    GRAMMAR_CACHE,
    STEP_SECONDS,
)


@dataclass(frozen=True, slots=True)
class Reading:
    """The present value of a metric that is kept elsewhere.

    Attributes:
        value: of a counter or gauge; the sum of a summary or histogram.
        labels: in the order of the spec.
        count: observations of a summary or histogram.
        buckets: of a histogram: upper bound, observations up to it.
    """

    spec: MetricSpec
    value: float
    labels: tuple[str, ...] = ()
    count: int = 0
    buckets: tuple[tuple[float, int], ...] = ()


Source = Callable[[], Iterable[Reading]]
LiveT = TypeVar("LiveT", Counter, Gauge, Histogram)
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


class Metrics:
    """The registry of one process. Thread-safe.

    Metrics come to life on first use, so a process shows only what it has.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._live: dict[str, Counter | Gauge | Histogram] = {}
        self._lock = Lock()
        self._collector = _SourceCollector()
        self._registry.register(self._collector)

    def add_source(self, source: Source) -> None:
        """Ask `source` for its readings at every scrape; it must be quick and thread-safe."""
        self._collector.sources.append(source)

    def count(self, spec: MetricSpec, *labels: str, amount: float = 1.0) -> None:
        """Add `amount` (>= 0) to a counter."""
        self._live_metric(spec, Counter, labels).inc(amount)

    def set(self, spec: MetricSpec, value: float, *labels: str) -> None:
        """Set a gauge."""
        self._live_metric(spec, Gauge, labels).set(value)

    def observe(self, spec: MetricSpec, value: float, *labels: str) -> None:
        """Add one observation to a histogram."""
        self._live_metric(spec, Histogram, labels).observe(value)

    def observe_ttft(self, kind: str, stages_s: Mapping[str, float]) -> None:
        """Record one request's time to first token and its stages.

        Args:
            kind: `free` or the constraint's label.
            stages_s: seconds by stage; their sum is the TTFT.
        """
        self.observe(TTFT, sum(stages_s.values()), kind)
        for stage, seconds in stages_s.items():
            self.observe(TTFT_STAGE, seconds, stage, kind)

    def render(self) -> bytes:
        """The text exposition of everything, for a `/metrics` answer of type `CONTENT_TYPE`."""
        return generate_latest(self._registry)

    def _live_metric(self, spec: MetricSpec, type_: type[LiveT], labels: tuple[str, ...]) -> LiveT:
        with self._lock:
            metric = self._live.get(spec.name)
            if metric is None:
                metric = self._live[spec.name] = self._create(spec)
        if not isinstance(metric, type_):
            raise Bug(f"{spec.name} is a {spec.type.value}")
        return metric.labels(*labels) if labels else metric

    def _create(self, spec: MetricSpec) -> Counter | Gauge | Histogram:
        match spec.type:
            case MetricType.COUNTER:
                return Counter(spec.name, spec.help, spec.labels, registry=self._registry)
            case MetricType.GAUGE:
                return Gauge(spec.name, spec.help, spec.labels, registry=self._registry)
            case MetricType.HISTOGRAM:
                return Histogram(spec.name, spec.help, spec.labels, buckets=spec.buckets, registry=self._registry)
            case MetricType.SUMMARY:
                raise Bug(f"{spec.name}: a summary is read at scrape time only")


Family = CounterMetricFamily | GaugeMetricFamily | SummaryMetricFamily | HistogramMetricFamily


class _SourceCollector(Collector):
    """Turns the readings of all sources into metric families at scrape time."""

    def __init__(self) -> None:
        self.sources: list[Source] = []

    def collect(self) -> Iterable[Metric]:
        """Read every source once; readings of one metric become one family."""
        families: dict[str, Family] = {}
        for source in self.sources:
            for reading in source():
                family = families.setdefault(reading.spec.name, _family(reading.spec))
                _add(family, reading)
        return list(families.values())


def _add(family: Family, reading: Reading) -> None:
    if isinstance(family, SummaryMetricFamily):
        family.add_metric(reading.labels, count_value=reading.count, sum_value=reading.value)
    elif isinstance(family, HistogramMetricFamily):
        bounds = [(str(bound), float(count)) for bound, count in reading.buckets]
        family.add_metric(reading.labels, [*bounds, ("+Inf", float(reading.count))], reading.value)
    else:
        family.add_metric(reading.labels, reading.value)


def _family(spec: MetricSpec) -> Family:
    match spec.type:
        case MetricType.COUNTER:
            return CounterMetricFamily(spec.name, spec.help, labels=spec.labels)
        case MetricType.GAUGE:
            return GaugeMetricFamily(spec.name, spec.help, labels=spec.labels)
        case MetricType.SUMMARY:
            return SummaryMetricFamily(spec.name, spec.help, labels=spec.labels)
        case MetricType.HISTOGRAM:
            return HistogramMetricFamily(spec.name, spec.help, labels=spec.labels)

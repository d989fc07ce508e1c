"""The proxy's Prometheus metrics (names: DESIGN §7).

Owns: one registry per proxy, every metric's name, labels and help. Does not know: where the numbers come from.
"""

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class ProxyMetrics:
    """All of them, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.ttft = Histogram(
            "pd_ttft_seconds",
            "From a request's arrival at the proxy to its first byte leaving.",
            ["kind"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.ttft_stage = Histogram(
            "pd_ttft_stage_seconds",
            "Stages of the TTFT; per request they add up to it.",
            ["stage", "kind"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.requests = self._counter("pd_proxy_requests", "Requests ended, by outcome.", ["path", "outcome"])
        self.legs = self._counter("pd_proxy_legs", "Legs ended, by result.", ["leg", "result"])
        self.retries = self._counter("pd_proxy_retries", "Legs sent again, by cause.", ["leg", "cause"])
        self.fallback = self._counter("pd_fallback", "Requests served without a prefill leg, by reason.", ["reason"])
        self.releases = self._counter("pd_proxy_kv_releases", "P told to release KV, by result.", ["result"])
        self._children: dict[str, list[tuple[str, Histogram]]] = {}

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge that is read when scraped."""
        Gauge(name, text, registry=self.registry).set_function(read)

    def observe_ttft(self, kind: str, ttft_s: float, stages_s: Mapping[str, float]) -> None:
        """Record one request's TTFT and its stages."""
        self.ttft.labels(kind).observe(ttft_s)
        stages = self._children.get(kind)
        if stages is None:
            stages = self._children[kind] = [(name, self.ttft_stage.labels(name, kind)) for name in stages_s]
        for name, histogram in stages:
            histogram.observe(stages_s[name])

    def expose(self) -> bytes:
        """The text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

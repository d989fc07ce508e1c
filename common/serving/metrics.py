"""`/metrics`, and the engine's status as metric readings.

Owns: which field of `EngineStatus` is which metric. Does not know: how they are measured.
"""

from collections.abc import Callable, Iterable

from aiohttp import web

from common.engine.status import EngineStatus
from common.telemetry import metrics
from common.telemetry.metrics import Metrics, Reading, Source


class MetricsRoute:
    """The route. Answers while the model loads, too."""

    def __init__(self, registry: Metrics) -> None:
        self._registry = registry

    async def scrape(self, _: web.Request) -> web.Response:
        """Everything, in Prometheus' text format."""
        return web.Response(body=self._registry.render(), headers={"Content-Type": metrics.CONTENT_TYPE})


def engine_readings(status: Callable[[], EngineStatus]) -> Source:
    """A source of the engine's gauges and counters."""

    def read() -> Iterable[Reading]:
        """The numbers of now."""
        now = status()
        yield Reading(metrics.REQUESTS_RUNNING, now.num_running)
        for state, number in (
            ("waiting", now.num_waiting),
            ("grammar", now.num_waiting_for_grammar),
            ("remote_kv", now.num_waiting_for_remote_kv),
            ("preempted", now.num_preempted),
        ):
            yield Reading(metrics.REQUESTS_WAITING, number, (state,))
        yield Reading(metrics.KV_BLOCKS_IN_USE, now.num_blocks_in_use)
        yield Reading(metrics.KV_BLOCKS_TOTAL, now.num_blocks_total)
        for source, tokens in (
            ("computed", now.prompt_tokens_computed),
            ("prefix_hit", now.prompt_tokens_prefix_hit),
            ("pulled", now.prompt_tokens_pulled),
        ):
            yield Reading(metrics.PROMPT_TOKENS, tokens, (source,))
        yield Reading(metrics.GENERATION_TOKENS, now.num_generated_tokens)
        num_wrong = now.num_draft_tokens - now.num_accepted_draft_tokens
        for result, tokens in (("accepted", now.num_accepted_draft_tokens), ("rejected", num_wrong)):
            yield Reading(metrics.DRAFT_TOKENS, tokens, (result,))
        yield Reading(metrics.PREEMPTIONS, now.num_preemptions)
        for reason, number in now.fallbacks.items():
            yield Reading(metrics.FALLBACK, number, (reason,))
        parts = now.step_seconds
        for part in ("plan", "forward", "mask_wait", "sample", "apply"):
            yield Reading(metrics.STEP_SECONDS, getattr(parts, part), (part,), count=now.num_steps)

    return read


class GrammarMetrics:
    """Counts compilations and cache look-ups. Any thread."""

    def __init__(self, registry: Metrics) -> None:
        self._registry = registry

    def compiled(self, backend: str, outcome: str, seconds: float) -> None:
        """One compilation ended."""
        self._registry.observe(metrics.GRAMMAR_COMPILE_SECONDS, seconds, backend, outcome)

    def looked_up(self, result: str) -> None:
        """One cache look-up."""
        self._registry.count(metrics.GRAMMAR_CACHE, result)

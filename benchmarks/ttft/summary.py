"""From samples to what is reported: percentiles per cell, ratio to free, median of each stage.

Owns: the summary rows and their JSON.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.ttft.cells import Cell
from benchmarks.ttft.measure import Refusal, Sample
from benchmarks.ttft.statistics import Estimate, percentile, ratio_of_medians

STAGE_ORDER = (
    "front", "queue_p", "grammar_p", "prefill", "handoff", "grammar_d", "queue_d", "pull", "first", "return",
)  # fmt: skip
"""Stages of a P/D request in journey order (DESIGN §3); others a server reports come after them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Summary of one cell, in milliseconds.

    Attributes:
        to_free: median TTFT over that of the free cell of its target and length.
        stages_ms: median of each stage.
        samples_ms: every TTFT, in the order measured.
        refusals: messages of the requests that were refused.
    """

    cell: Cell
    num_samples: int
    refusals: tuple[str, ...]
    p50: Estimate
    p90: Estimate
    p99: Estimate
    to_free: Estimate | None
    stages_ms: dict[str, float]
    samples_ms: tuple[float, ...]

    @property
    def num_refused(self) -> int:
        """Requests that were refused; they are no samples."""
        return len(self.refusals)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def summarise(results: Mapping[Cell, Sequence[Sample | Refusal]]) -> list[Row]:
    """One row per cell with at least one answered request, in the order measured."""
    rows = []
    for cell, answers in results.items():
        samples = [answer for answer in answers if isinstance(answer, Sample)]
        if not samples:
            continue
        ttft_ms = [sample.ttft_ms for sample in samples]
        rows.append(
            Row(
                cell=cell,
                num_samples=len(samples),
                refusals=tuple(f"{a.status}: {a.message}" for a in answers if isinstance(a, Refusal)),
                p50=percentile(ttft_ms, 50),
                p90=percentile(ttft_ms, 90),
                p99=percentile(ttft_ms, 99),
                to_free=_ratio_to_free(cell, ttft_ms, results),
                stages_ms=_stage_medians(samples),
                samples_ms=tuple(ttft_ms),
            )
        )
    return rows


def _ratio_to_free(
    cell: Cell, ttft_ms: Sequence[float], results: Mapping[Cell, Sequence[Sample | Refusal]]
) -> Estimate | None:
    if cell.kind == "free":
        return None
    for other, answers in results.items():
        if other.kind == "free" and (other.target, other.prompt_words) == (cell.target, cell.prompt_words):
            free_ms = [answer.ttft_ms for answer in answers if isinstance(answer, Sample)]
            return ratio_of_medians(ttft_ms, free_ms) if free_ms else None
    return None


def _stage_medians(samples: Sequence[Sample]) -> dict[str, float]:
    names = {name for sample in samples for name in sample.stages_ms}
    known = [name for name in STAGE_ORDER if name in names] + sorted(names - set(STAGE_ORDER))
    return {name: statistics.median(sample.stages_ms.get(name, 0.0) for sample in samples) for name in known}

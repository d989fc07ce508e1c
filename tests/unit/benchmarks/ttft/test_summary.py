import numpy as np
import pytest

from benchmarks.ttft import page
from benchmarks.ttft.cells import Cell, Constraints, body_of, load_schemas
from benchmarks.ttft.measure import Refusal, Sample
from benchmarks.ttft.statistics import percentile, ratio_of_medians
from benchmarks.ttft.summary import summarise

FREE, JSON = Cell("prepare", "free", 30, False), Cell("prepare", "json", 30, True)


def test_a_percentile_lies_inside_its_interval_and_equals_numpy_s() -> None:
    samples = list(np.random.default_rng(1).exponential(100, size=60))
    estimate = percentile(samples, 90)
    assert estimate.value == pytest.approx(np.percentile(samples, 90))
    assert estimate.low <= estimate.value <= estimate.high


def test_the_ratio_of_equal_samples_is_one_with_one_inside() -> None:
    samples = [10.0, 11.0, 12.0, 13.0]
    estimate = ratio_of_medians(samples, samples)
    assert estimate.value == 1.0
    assert estimate.low <= 1.0 <= estimate.high


def test_a_structured_cell_is_set_against_the_free_cell_of_its_target_and_length() -> None:
    rows = summarise(
        {
            FREE: [Sample(100.0, 120.0, {"prefill": 90.0, "return": 10.0})] * 3,
            JSON: [Sample(150.0, 170.0, {"prefill": 90.0, "grammar_d": 50.0}), Refusal(400, "no")],
            Cell("strip", "json", 30, True): [Sample(1.0, 1.0)],
        }
    )
    free, structured, lonely = rows
    assert free.to_free is None
    assert structured.to_free is not None
    assert structured.to_free.value == pytest.approx(1.5)
    assert (structured.num_samples, structured.num_refused) == (1, 1)
    assert structured.refusals == ("400: no",)
    assert list(structured.stages_ms) == ["prefill", "grammar_d"]
    assert lonely.to_free is None


def test_the_page_shows_every_cell_and_needs_nothing_from_outside() -> None:
    rows = summarise({FREE: [Sample(100.0, 120.0, {"prefill": 90.0})], JSON: [Sample(150.0, 170.0, {"pull": 9.0})]})
    text = page.render(rows, "pd-bench ttft <x>", "2026-01-01")
    assert "json, cold" in text
    assert "pd-bench ttft &lt;x&gt;" in text
    assert "http" not in text
    assert "<script" not in text


def test_cold_constraints_differ_each_time_and_warm_ones_never() -> None:
    import random

    constraints = Constraints(load_schemas(None), seed=1)
    cold = [constraints.make(kind, True) for kind in ("json", "big", "regex", "choice", "grammar") for _ in range(5)]
    assert len({repr(fields) for fields in cold}) == len(cold)
    assert constraints.make("json", False) == constraints.make("json", False)
    bodies = [body_of(JSON, "m", constraints, random.Random(seed)) for seed in range(2)]
    assert bodies[0]["messages"] != bodies[1]["messages"]

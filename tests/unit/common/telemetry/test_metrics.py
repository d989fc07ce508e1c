import pytest

from common.errors import Bug
from common.telemetry import metrics
from common.telemetry.metrics import Metrics, Reading


def test_ttft_is_the_sum_of_its_stages_and_labelled_by_kind():
    registry = Metrics()
    registry.observe_ttft("json", {"queue": 0.25, "compute": 0.5})
    text = registry.render().decode()
    assert 'pd_ttft_seconds_sum{kind="json"} 0.75' in text
    assert 'pd_ttft_stage_seconds_sum{kind="json",stage="queue"} 0.25' in text


def test_sources_are_read_at_every_scrape():
    registry = Metrics()
    running = [1.0]
    registry.add_source(lambda: [Reading(metrics.REQUESTS_RUNNING, running[0])])
    assert "pd_requests_running 1.0" in registry.render().decode()
    running[0] = 5.0
    assert "pd_requests_running 5.0" in registry.render().decode()


def test_readings_of_one_name_share_one_family_whatever_source_they_came_from():
    registry = Metrics()
    registry.add_source(lambda: [Reading(metrics.LEASES_RELEASED, 2, ("read",))])
    registry.add_source(lambda: [Reading(metrics.LEASES_RELEASED, 1, ("expired",))])
    text = registry.render().decode()
    assert text.count("# TYPE pd_leases_released_total counter") == 1
    assert 'pd_leases_released_total{cause="read"} 2.0' in text
    assert 'pd_leases_released_total{cause="expired"} 1.0' in text


def test_counters_and_histograms_show_only_once_used():
    registry = Metrics()
    assert b"pd_requests_total" not in registry.render()
    registry.count(metrics.REQUESTS, "/v1/completions", "200")
    registry.set(metrics.LEASES_HELD, 3)
    assert b'pd_requests_total{route="/v1/completions",status="200"} 1.0' in registry.render()


def test_a_metric_used_as_another_type_is_a_bug():
    with pytest.raises(Bug):
        Metrics().count(metrics.LEASES_HELD)


def test_two_registries_share_nothing():
    first, second = Metrics(), Metrics()
    first.observe(metrics.TTFT, 0.1, "forward")
    assert b"forward" not in second.render()


def test_every_name_of_the_catalogue_is_unique_and_carries_its_unit():
    names = [spec.name for spec in metrics.CATALOGUE]
    assert len(names) == len(set(names))
    assert all(spec.name.endswith("_total") for spec in metrics.CATALOGUE if spec.type is metrics.MetricType.COUNTER)
    assert all(
        spec.name.endswith("_seconds")
        for spec in metrics.CATALOGUE
        if spec.type in (metrics.MetricType.HISTOGRAM, metrics.MetricType.SUMMARY)
    )


def test_a_summary_shows_sum_and_count():
    registry = Metrics()
    registry.add_source(lambda: [Reading(metrics.STEP_SECONDS, 1.5, ("forward",), count=3)])
    text = registry.render().decode()
    assert 'pd_step_seconds_sum{part="forward"} 1.5' in text
    assert 'pd_step_seconds_count{part="forward"} 3.0' in text


def test_a_histogram_kept_elsewhere_shows_its_buckets():
    registry = Metrics()
    reading = Reading(metrics.KV_PULL_SECONDS, 0.5, count=3, buckets=((0.1, 1), (0.2, 2)))
    registry.add_source(lambda: [reading])
    text = registry.render().decode()
    assert 'pd_kv_pull_seconds_bucket{le="0.2"} 2.0' in text
    assert 'pd_kv_pull_seconds_bucket{le="+Inf"} 3.0' in text
    assert "pd_kv_pull_seconds_sum 0.5" in text

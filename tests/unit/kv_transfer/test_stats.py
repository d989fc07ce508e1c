"""Histogram buckets."""

from kv_transfer.stats import Histogram


def test_a_value_on_a_bound_falls_into_the_bucket_below_and_the_rest_over_the_last() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert histogram.value().counts == (2, 1, 1)
    assert histogram.value().total == 12.0

"""Percentiles with bootstrap intervals, and ratios of medians with theirs.

Owns: the arithmetic. Source: percentile bootstrap (Efron & Tibshirani 1993, ch. 13).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float


def percentile(samples: Sequence[float], q: float, seed: int = 0) -> Estimate:
    """The q-th percentile of `samples` (at least one)."""
    values = np.asarray(samples, dtype=np.float64)
    drawn = np.percentile(_resample(values, seed), q, axis=1)
    return Estimate(
        float(np.percentile(values, q)), float(np.percentile(drawn, 2.5)), float(np.percentile(drawn, 97.5))
    )


def ratio_of_medians(top: Sequence[float], bottom: Sequence[float], seed: int = 0) -> Estimate:
    """median(top) / median(bottom); the two are resampled independently."""
    tops, bottoms = np.asarray(top, dtype=np.float64), np.asarray(bottom, dtype=np.float64)
    drawn = np.median(_resample(tops, seed), axis=1) / np.median(_resample(bottoms, seed + 1), axis=1)
    value = float(np.median(tops) / np.median(bottoms))
    return Estimate(value, float(np.percentile(drawn, 2.5)), float(np.percentile(drawn, 97.5)))


def _resample(
    values: "np.ndarray[tuple[int], np.dtype[np.float64]]", seed: int
) -> "np.ndarray[tuple[int, int], np.dtype[np.float64]]":
    chosen = np.random.default_rng(seed).integers(0, len(values), size=(RESAMPLES, len(values)))
    return np.asarray(values[chosen], dtype=np.float64).reshape(RESAMPLES, len(values))

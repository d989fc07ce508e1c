"""Durations of a request's stages between processes: the `Server-Timing` header (W3C) in milliseconds.

Owns: the codec. Stage names: `common.telemetry.timeline`.
"""

from collections.abc import Mapping

HEADER = "Server-Timing"


def encode(stages_s: Mapping[str, float]) -> str:
    """`{"queue": 0.0012} -> "queue;dur=1.200"`."""
    return ", ".join(f"{name};dur={seconds * 1000:.3f}" for name, seconds in stages_s.items())


def decode(header: str | None) -> dict[str, float]:
    """Stage name → seconds; metrics without a readable `dur` are left out."""
    stages: dict[str, float] = {}
    if not header:
        return stages
    for metric in header.split(","):
        name, *parameters = [part.strip() for part in metric.split(";")]
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key == "dur" and name:
                try:
                    stages[name] = float(value) / 1000
                except ValueError:
                    continue
    return stages

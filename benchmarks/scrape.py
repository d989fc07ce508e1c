"""Numbers out of a server's `/metrics`.

Owns: the request and what is asked of its answer. Does not know: whose metrics they are.
"""

import urllib.request
from collections.abc import Collection, Iterator

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_TIMEOUT_S = 30.0


def total(base: str, *names: str) -> float:
    """Sum of the samples of these names over their labels; 0 where the server has none.

    Args:
        base: URL of the server.
        names: as in the text, with `_total`, `_sum`, `_bucket`.
    """
    return totals(base, names)[0]


def totals(base: str, *groups: Collection[str]) -> list[float]:
    """The same for each group of names, all out of one answer."""
    samples = list(_samples(base))
    return [sum(sample.value for sample in samples if sample.name in names) for names in groups]


def by_label(base: str, name: str, label: str) -> dict[str, float]:
    """The samples of `name` by the value of one of their labels, in the text's order."""
    return {sample.labels[label]: sample.value for sample in _samples(base) if sample.name == name}


def _samples(base: str) -> Iterator[Sample]:
    with urllib.request.urlopen(f"{base}/metrics", timeout=_TIMEOUT_S) as response:
        families = text_string_to_metric_families(response.read().decode())
        for family in families:
            yield from family.samples

"""Fingerprints: what differs is named."""

import msgspec
import pytest

from kv_transfer.compatibility import Fingerprint, differences
from tests.support.kv_pair import FINGERPRINT


def test_equal_fingerprints_differ_in_nothing() -> None:
    assert differences(FINGERPRINT, FINGERPRINT) == ()


@pytest.mark.parametrize("name", Fingerprint.__struct_fields__)
def test_each_field_that_differs_is_named_with_both_values(name: str) -> None:
    value = getattr(FINGERPRINT, name)
    other = msgspec.structs.replace(FINGERPRINT, **{name: value + 1 if isinstance(value, int) else "zzz"})
    (phrase,) = differences(FINGERPRINT, other)
    assert phrase.startswith(f"{name} (ours {value!r}")

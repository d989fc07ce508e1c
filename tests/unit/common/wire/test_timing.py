import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.wire.timing import decode, encode

NAMES = st.text(alphabet="abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=12)


@given(st.dictionaries(NAMES, st.floats(min_value=0, max_value=1000)))
def test_stages_survive_the_header_to_a_microsecond(stages_s: dict[str, float]) -> None:
    assert decode(encode(stages_s)) == pytest.approx(stages_s, abs=1e-6)


@pytest.mark.parametrize("header", [None, "", "a", "a;desc=x", "a;dur=fast", ";dur=1", "a;dur"])
def test_what_is_no_duration_is_left_out(header: str | None) -> None:
    assert decode(header) == {}


def test_other_servers_spelling_is_read() -> None:
    assert decode('cache;desc="hit";dur=2.5 , db;dur=53') == {"cache": 0.0025, "db": 0.053}

"""P or D that freezes for a while in the middle of a request costs time and nothing else. All faults: `make long`."""

import pytest

from tests.support.fault_rig import assert_fault_free_text, one_cell
from tests.support.trio import Trio

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("place", "victim"), [("prefill", "prefill"), ("stream", "decode")])
async def test_an_engine_that_freezes_in_the_middle_of_a_request_costs_time_only(
    trio: Trio, place: str, victim: str
) -> None:
    asked = await one_cell(trio, place, victim, "delay", num_prompt_tokens=800)  # two steps: P is seen between them
    assert asked.end == "right", asked.detail
    await assert_fault_free_text(trio, asked)

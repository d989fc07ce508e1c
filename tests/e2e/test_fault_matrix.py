"""Places of a request's journey x P, D or the proxy x killed, stopped, late: a right answer or a clean error within
the deadline, and nothing is held by whoever is left. Real processes, real NIXL.

    place     P killed  stopped  late    D killed  stopped  late    proxy killed  stopped and continued
    prefill   right     right    right   error     error    right   gone          right
    held      right     right    right   error     error    right   gone          right
    stream    right     right    right   error     error    right   gone          right
    reading   right     right    right   (over tcp: P is stopped in the middle of a read)

`right` is the fault-free text, by whatever way: P's KV, another P, or computed by D. `gone`: the connection breaks.
"""

import asyncio
import os
from collections.abc import Iterator

import pytest

from tests.support.fault_rig import (
    DEADLINE_S,
    LEASE_TTL_S,
    OVERRIDES,
    Asked,
    assert_fault_free_text,
    assert_nothing_held,
    body_of,
    heal,
    hurt,
    occupied,
    one_cell,
    reach,
    total,
)
from tests.support.trio import MODEL, ROLES, Trio, running_trio

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(200)]
PLACES = [("sm", "prefill"), ("sm", "held"), ("sm", "stream"), ("tcp", "held")]
"""Transport and place: over tcp a pull needs P alive, so `held` ends there in another way."""

OVER_TCP = pytest.mark.parametrize("trio", ["tcp"], indirect=True, scope="module")
"""Over shared memory a read needs no help of P: there is no middle to hurt it in."""

WANTED = {
    ("prefill", "kill"): "right",
    ("prefill", "stop"): "right",
    ("prefill", "delay"): "right",
    ("decode", "kill"): "error",
    ("decode", "stop"): "error",
    ("decode", "delay"): "right",
    ("proxy", "kill"): "gone",
    ("proxy", "delay"): "right",
}


@pytest.fixture(scope="module")
def trio(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    if not MODEL.exists():
        pytest.skip(f"no default model at {MODEL}: run `make model`")
    environment = {**os.environ, "UCX_TLS": "sm,self,tcp" if request.param == "sm" else "tcp,self"}
    with running_trio(tmp_path_factory.mktemp(request.param), OVERRIDES, environment=environment) as running:
        yield running


@pytest.mark.parametrize(("trio", "place"), PLACES, indirect=["trio"], scope="module")
@pytest.mark.parametrize(("victim", "fault"), list(WANTED))
async def test_a_fault_ends_in_a_right_answer_or_a_clean_error_and_nothing_is_left(
    trio: Trio, place: str, victim: str, fault: str
) -> None:
    asked = await one_cell(trio, place, victim, fault)
    assert asked.end == WANTED[victim, fault], asked.detail
    if asked.end == "right":
        await assert_fault_free_text(trio, asked)


@OVER_TCP
@pytest.mark.parametrize("fault", ["kill", "stop", "delay"])
async def test_a_p_that_is_hurt_in_the_middle_of_a_read_costs_a_recompute_at_most(trio: Trio, fault: str) -> None:
    asked = await one_cell(trio, "reading", "prefill", fault)
    assert asked.end == "right", asked.detail
    await assert_fault_free_text(trio, asked)


@OVER_TCP
async def test_blocks_of_a_read_that_never_ends_stay_reserved_and_come_back(trio: Trio) -> None:
    for _ in range(4):
        asked = Asked(body_of("reading"))
        async with asyncio.TaskGroup() as group:
            answering = group.create_task(asked.run(trio.url("proxy")))
            await reach(trio, "reading", asked)
            hurt(trio, "prefill", "stop")
            await asyncio.wait_for(answering, DEADLINE_S)
        num_reserved = await total(trio, "decode", "pd_kv_blocks_in_use")
        await heal(trio, "prefill", "stop")
        assert asked.end == "right", asked.detail
        await assert_nothing_held(trio, ROLES)
        await assert_fault_free_text(trio, asked)
        if num_reserved > 0:
            return
    raise AssertionError("P was never stopped in the middle of a read")


@OVER_TCP
async def test_a_lease_outlives_a_d_that_is_full_for_longer_than_the_lease(trio: Trio) -> None:
    before = trio.metrics("decode").get('pd_prompt_tokens_total{source="pulled"}', 0.0)
    asked = Asked(body_of("held"))
    async with asyncio.TaskGroup() as group:
        async with occupied(trio, "held"):
            answering = group.create_task(asked.run(trio.url("proxy")))
            await reach(trio, "held", asked)
            await asyncio.sleep(2 * LEASE_TTL_S)
            assert await total(trio, "prefill", "pd_leases_held") == 1
        await asyncio.wait_for(answering, DEADLINE_S)
    assert asked.end == "right", asked.detail
    assert trio.metrics("decode")['pd_prompt_tokens_total{source="pulled"}'] - before == len(asked.body["prompt"]) - 1
    await assert_nothing_held(trio, ROLES)
    await assert_fault_free_text(trio, asked)

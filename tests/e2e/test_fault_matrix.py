"""Places of a request's journey x P, D or the proxy x killed, refusing, stopped, late: a right answer or a clean error
within the deadline, and nothing is held by whoever is left. Real processes, real NIXL.

    row     place     P: any fault    D killed, refusing, stopped   D late    proxy killed   late
    1       body      right           error                         right     gone           right
    2       queued    right           error                         right     gone           right
    3a      prepare   right           error                         right     gone           right
    3b      prefill   right           error                         right     gone           right
    4 to 6  held      right           error                         right     gone           right
    7       reading   right           error                         right     gone           right   (over tcp)
    8, 9    stream    right           error                         right     gone           right

`right` is the fault-free text, by whatever way: P's KV, another P, or computed by D. `gone`: the connection breaks.
Killed: connections are refused from then on. Refusing: somebody else answers on the port, 503 to everything.
"""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.support.fault_rig import (
    DEADLINE_S,
    LEASE_TTL_S,
    OVERRIDES,
    TRIES,
    Asked,
    Fault,
    Missed,
    assert_fault_free_text,
    assert_nothing_held,
    body_of,
    occupied,
    one_cell,
    reach,
    total,
)
from tests.support.trio import MODEL, ROLES, Trio, running_trio

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(200)]
PLACES = [
    *(("sm", place) for place in ("body", "queued", "prepare", "prefill", "held", "stream")),
    ("tcp", "held"),
    ("tcp", "reading"),
]
"""Transport and place. Over tcp a pull needs P alive, so `held` ends there in another way; over shared memory a read
needs no help of P, and there is no middle to hurt it in."""

OVER_TCP = pytest.mark.parametrize("trio", ["tcp"], indirect=True, scope="module")
WANTED = {
    ("prefill", "kill"): "right",
    ("prefill", "refuse"): "right",
    ("prefill", "stop"): "right",
    ("prefill", "delay"): "right",
    ("decode", "kill"): "error",
    ("decode", "refuse"): "error",
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
@pytest.mark.parametrize(("victim", "kind"), list(WANTED))
async def test_a_fault_ends_in_a_right_answer_or_a_clean_error_and_nothing_is_left(
    trio: Trio, place: str, victim: str, kind: str
) -> None:
    asked = await one_cell(trio, place, victim, kind)
    assert asked.end == WANTED[victim, kind], asked.detail
    assert asked.seconds < DEADLINE_S
    if asked.end == "right":
        await assert_fault_free_text(trio, asked)


@pytest.mark.parametrize("trio", ["sm", "tcp"], indirect=True, scope="module")
async def test_a_p_that_was_replaced_before_the_pull_is_not_read_from(trio: Trio) -> None:
    asked = await one_cell(trio, "held", "prefill", "restart")
    assert asked.end == "right", asked.detail
    await assert_fault_free_text(trio, asked)


@OVER_TCP
async def test_blocks_of_a_read_that_never_ends_stay_reserved_and_come_back(trio: Trio) -> None:
    for _ in range(2 * TRIES):
        read = await _stopped_read(trio)
        if read is None:
            continue
        num_reserved = await total(trio, "decode", "pd_kv_blocks_in_use")
        await read.stopped.end()
        assert read.asked.end == "right", read.asked.detail
        await assert_nothing_held(trio, ROLES)
        await assert_fault_free_text(trio, read.asked)
        if num_reserved > 0:
            return
    raise AssertionError("P was never stopped in the middle of a read")


@OVER_TCP
@pytest.mark.parametrize("kind", ["kill", "stop"])
async def test_p_gets_its_blocks_back_from_a_d_that_is_hurt_in_the_middle_of_a_read(trio: Trio, kind: str) -> None:
    """P stands still from the middle of the read on, so that D is surely hurt in it."""
    for _ in range(2 * TRIES):
        hurt, num_read = Fault(trio, "decode", kind), await _num_read(trio)
        read = await _stopped_read(trio, hurt)
        if read is None:
            continue
        if read.was_under_way:
            assert read.asked.end == "error", read.asked.detail
            await assert_nothing_held(trio, ("prefill", "proxy"))
            assert await _num_read(trio) == num_read  # it was given up or ran out
        await hurt.end()
        await assert_nothing_held(trio, ROLES)
        if read.was_under_way:
            return
    raise AssertionError("D was never hurt in the middle of a read")


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


@dataclass(frozen=True)
class StoppedRead:
    """An answered request during whose read P stood still; `stopped` is to be ended where nothing else was hurt."""

    asked: Asked
    stopped: Fault
    was_under_way: bool


async def _stopped_read(trio: Trio, hurt: Fault | None = None) -> StoppedRead | None:
    """Ask, and stop P in the middle of D's read; with `hurt`, that happens then and P goes on. None: it was late."""
    asked, stopped = Asked(body_of("reading")), Fault(trio, "prefill", "stop")
    async with asyncio.TaskGroup() as group:
        answering = group.create_task(asked.run(trio.url("proxy")))
        try:
            await reach(trio, "reading", asked)
        except Missed:
            return None
        await stopped.begin()
        was_under_way = await _is_pulling(trio)
        if hurt is not None:
            await hurt.begin()
            await stopped.resume()
        await asyncio.wait_for(answering, DEADLINE_S)
    return StoppedRead(asked, stopped, was_under_way)


async def _num_read(trio: Trio) -> float:
    metrics = await asyncio.to_thread(trio.metrics, "prefill")
    return metrics.get('pd_leases_released_total{cause="read"}', 0.0)


async def _is_pulling(trio: Trio) -> bool:
    """Whether D waits for KV; P stands still, so a read that goes on now goes on until P does."""
    await asyncio.sleep(0.05)  # what was under way when P stopped has ended by then, or never does
    return await total(trio, "decode", "pd_requests_waiting") > 0

from random import Random
from typing import Any

import msgspec

from common.clock import Deadline, ManualClock
from proxy.call import Call, make_call
from proxy.fleet.breaker import Breaker
from proxy.fleet.worker import Role, Worker
from proxy.routing.affinity import AffinityTable
from proxy.routing.grammar_warm import GrammarWarm
from proxy.routing.least_loaded import LeastLoaded
from proxy.routing.prefix_affinity import PrefixAffinity, block_keys
from proxy.routing.round_robin import RoundRobin

CLOCK = ManualClock()


def workers(number: int) -> list[Worker]:
    return [Worker(Role.DECODE, f"http://d:{i + 1}", Breaker(CLOCK, 3, 1.0)) for i in range(number)]


def call(**fields: Any) -> Call:
    return make_call(
        "/v1/completions",
        msgspec.json.encode(fields),
        headers={},
        request_id="r",
        received_s=0,
        deadline=Deadline.after(CLOCK, 1),
    )


def test_round_robin_takes_turns() -> None:
    team, policy = workers(3), RoundRobin()
    picked = [policy.pick(team, call()) for _ in range(6)]
    assert picked[:3] == picked[3:]
    assert set(picked) == set(team)


def test_least_loaded_never_picks_the_busier_of_two() -> None:
    busy, idle = workers(2)
    policy = LeastLoaded(Random(0))
    busy.load(10_000)
    assert all(policy.pick([busy, idle], call()) is idle for _ in range(20))
    assert policy.pick([busy], call()) is busy


def test_least_loaded_spreads_over_a_team() -> None:
    team, policy = workers(4), LeastLoaded(Random(0))
    for _ in range(400):
        policy.pick(team, call()).load(100)
    assert max(w.num_legs for w in team) - min(w.num_legs for w in team) < 20


def test_prompts_that_begin_alike_go_to_the_same_engine() -> None:
    team, policy = workers(4), PrefixAffinity(RoundRobin())
    first = policy.pick(team, call(prompt="a" * 2000 + "x"))
    assert all(policy.pick(team, call(prompt="a" * 2000 + end)) is first for end in ("y", "z" * 500, ""))
    others = {policy.pick(team, call(prompt=letter * 2000)) for letter in "bcde"}
    assert len(others) == 4


def test_an_overloaded_engine_loses_its_affinity() -> None:
    team, policy = workers(2), PrefixAffinity(LeastLoaded(Random(0)))
    first = policy.pick(team, call(prompt="a" * 2000))
    first.load(10 << 20)
    assert policy.pick(team, call(prompt="a" * 2000)) is not first


def test_an_engine_that_left_is_not_missed() -> None:
    team, policy = workers(2), PrefixAffinity(RoundRobin())
    first = policy.pick(team, call(prompt="a" * 2000))
    rest = [worker for worker in team if worker is not first]
    assert policy.pick(rest, call(prompt="a" * 2000)) is rest[0]


def test_keys_of_equal_beginnings_are_equal_as_far_as_they_go() -> None:
    one, other = block_keys(call(prompt="a" * 1000 + "b" * 1000)), block_keys(call(prompt="a" * 1000 + "c" * 1000))
    assert one[:3] == other[:3]
    assert one[4:] != other[4:]
    assert block_keys(call(prompt="short")) == []
    assert block_keys(call(prompt="a" * 1000, model="m")) != block_keys(call(prompt="a" * 1000, model="n"))


def test_a_constraint_goes_where_it_was_compiled_and_free_text_anywhere() -> None:
    team, policy = workers(4), GrammarWarm(RoundRobin())
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    first = policy.pick(team, call(prompt="x", response_format=schema))
    assert all(policy.pick(team, call(prompt=str(i), response_format=schema)) is first for i in range(5))
    assert len({policy.pick(team, call(prompt="x")) for _ in range(4)}) == 4


def test_the_table_forgets_the_oldest_keys() -> None:
    table, (worker,) = AffinityTable(max_keys=2), workers(1)
    table.remember([1, 2], worker)
    table.remember([1, 3], worker)
    assert table.depth_by_worker([2], [worker]) == {worker: 0}
    assert table.depth_by_worker([1, 3], [worker]) == {worker: 2}

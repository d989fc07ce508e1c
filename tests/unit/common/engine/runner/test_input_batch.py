import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from common.engine.admission import make_choices
from common.engine.runner.input_batch import InputBatch
from common.engine.sampling.batch_state import NO_CHANGE
from common.engine.scheduling.sequence import Request
from common.engine.step import ScheduledChunk, StepPlan
from common.errors import Bug
from common.ids import BlockId
from tests.support.fake_engine import ask
from tests.support.fake_sampler import GreedySampler


def request(name: str, *block_ids: int) -> Request:
    (made,) = make_choices(ask(name, [1, 2, 3]), 0, frozenset())
    made.holding.table.extend([BlockId(i) for i in block_ids])
    return made


def plan(*requests: Request, left: tuple[Request, ...] = ()) -> StepPlan:
    chunks = tuple(ScheduledChunk(each, 0, 1, samples=True) for each in requests)
    return StepPlan(chunks=chunks, left=tuple(each.key for each in left))


def table(batch: InputBatch, each: Request) -> list[int]:
    batch.append_blocks([each])
    row, free = batch.row(each), batch.block_tables[len(batch) :]
    assert not batch.block_tables[row, batch.num_blocks[row] :].any(), "blocks of somebody else"
    assert not free.any(), "a free row with blocks"
    return batch.block_tables[row, : batch.num_blocks[row]].tolist()


def test_rows_stay_and_only_new_blocks_are_written() -> None:
    batch, a = InputBatch(4, 8), request("a", 5, 6)
    batch.update(plan(a))
    a.holding.table.extend([BlockId(7)])
    assert batch.update(plan(a)) is NO_CHANGE
    assert table(batch, a) == [5, 6, 7]


def test_a_newcomer_takes_the_row_of_one_that_left_and_none_of_its_blocks() -> None:
    batch, a, b, c = InputBatch(4, 8), request("a", 1, 2, 3), request("b", 4), request("c", 5)
    batch.update(plan(a, b))
    update = batch.update(plan(b, c, left=(a,)))
    assert (update.removed, [added.row for added in update.added], update.moved) == ((0,), [0], ())
    assert table(batch, c) == [5]


def test_rows_close_up_when_nobody_comes() -> None:
    batch, a, b, c = InputBatch(4, 8), request("a", 1), request("b", 2), request("c", 3, 4)
    batch.update(plan(a, b, c))
    update = batch.update(plan(b, c, left=(a,)))
    assert [(moved.source, moved.target) for moved in update.moved] == [(2, 0)]
    assert (table(batch, c), table(batch, b)) == ([3, 4], [2])


def test_no_change_means_the_same_requests_in_the_same_order() -> None:
    batch, a, b = InputBatch(4, 8), request("a", 1), request("b", 2)
    batch.update(plan(a, b))
    assert batch.update(plan(b, a)) is not NO_CHANGE
    assert batch.update(plan(b)) is not NO_CHANGE
    assert batch.update(plan(b)) is NO_CHANGE
    assert batch.update(plan(b, left=(a,))) is not NO_CHANGE


def test_one_that_left_before_it_ever_had_a_row_is_no_trouble() -> None:
    assert InputBatch(4, 8).update(plan(left=(request("a"),))).removed == ()


def test_a_request_that_comes_back_under_the_same_key_starts_anew() -> None:
    batch, a = InputBatch(4, 8), request("a", 1, 2)
    batch.update(plan(a))
    again = request("a", 3)
    update = batch.update(plan(again, left=(a,)))
    assert (update.removed, [added.row for added in update.added]) == ((0,), [0])
    assert table(batch, again) == [3]


def test_what_is_added_says_all_that_sampling_needs() -> None:
    batch, a = InputBatch(4, 8), request("a", 1)
    a.token_ids += [8, 9]
    (added,) = batch.update(plan(a)).added
    assert (tuple(added.prompt_token_ids), tuple(added.output_token_ids)) == ((1, 2, 3), (8, 9))
    assert (added.seed, added.params) == (a.seed, a.sampling)


def test_more_requests_than_rows_is_a_bug() -> None:
    with pytest.raises(Bug):
        InputBatch(1, 8).update(plan(request("a"), request("b")))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sets(st.integers(0, 7), max_size=5), max_size=12))
def test_the_sampler_follows_the_batch_through_any_coming_and_going(steps: list[set[int]]) -> None:
    batch, sampler, present = InputBatch(8, 4), GreedySampler(), dict[int, Request]()
    for changed in steps:
        left = tuple(present.pop(i) for i in changed & set(present))
        for i in changed - {int(each.key) for each in left}:
            present[i] = request(str(i), i, i + 1)
        sampler.update_batch(batch.update(plan(*present.values(), left=left)))
        assert sorted(batch.row(each) for each in present.values()) == list(range(len(present)))
        for i, each in present.items():
            assert sampler.rows[batch.row(each)][0].request_id == each.request_id
            assert table(batch, each) == [i, i + 1]

"""Plan and apply, without a model."""

import pytest

from common.engine.admission import make_choices
from common.engine.kv_cache.manager import KvCacheManager
from common.engine.ports import PullOutcome, PullStatus
from common.engine.request import GenerateRequest
from common.engine.request_state import FinishReason, RequestState
from common.engine.scheduling.plan_draft import MAX_PROMPT_LOGITS_PER_STEP
from common.engine.scheduling.scheduler import Scheduler
from common.engine.scheduling.sequence import Request
from common.engine.step import StepPlan
from common.telemetry.timeline import Event
from tests.support.fake_engine import ask, greedy
from tests.support.fake_grammar import up_to
from tests.support.fake_kv import reference_to

BLOCK_SIZE = 4


class Desk:
    """A scheduler, and "computing" that appends a made-up token wherever a plan samples."""

    def __init__(
        self, num_blocks: int = 64, max_num_seqs: int = 8, budget: int = 16, *, prefix_cache: bool = True
    ) -> None:
        self.kv = KvCacheManager(num_blocks, BLOCK_SIZE, enable_prefix_cache=prefix_cache)
        self.scheduler = Scheduler(self.kv, max_num_seqs, budget)
        self._order = 0

    def add(self, request: GenerateRequest) -> list[Request]:
        choices = make_choices(request, self._order, frozenset({0}))
        self._order += 1
        self.scheduler.add(choices[0])
        return choices

    def prompt(self, name: str, length: int, first: int = 1, **sampling: object) -> Request:
        return self.add(ask(name, [first, *range(1, length)], greedy(32, **sampling)))[0]

    def remote(self, name: str, length: int) -> Request:
        tokens = list(range(1, length + 1))
        return self.add(ask(name, tokens, reference=reference_to(tokens, BLOCK_SIZE)))[0]

    def step(self) -> StepPlan:
        plan = self.scheduler.plan()
        self.scheduler.apply(plan)
        for chunk in plan.chunks:
            if chunk.samples:
                chunk.request.token_ids.append(9)
        self.kv.check_integrity()
        return plan

    def settle(self, request: Request, status: PullStatus) -> Request | None:
        return self.scheduler.settle_pull(PullOutcome(request_id=request.key, status=status))


def shape(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    return [(chunk.request.key, chunk.start, chunk.num_tokens, chunk.samples) for chunk in plan.chunks]


def test_a_long_prompt_is_computed_in_chunks_of_the_budget_and_samples_at_its_end() -> None:
    desk = Desk(budget=16)
    desk.prompt("a", 40)
    assert shape(desk.step()) == [("a", 0, 16, False)]
    assert shape(desk.step()) == [("a", 16, 16, False)]
    assert shape(desk.step()) == [("a", 32, 8, True)]
    assert shape(desk.step()) == [("a", 40, 1, True)]


def test_several_prompts_and_decodes_share_a_step() -> None:
    desk = Desk(budget=16)
    desk.prompt("a", 3, 11)
    desk.step()
    desk.prompt("b", 5, 12)
    desk.prompt("c", 20, 13)
    assert shape(desk.step()) == [("a", 3, 1, True), ("b", 0, 5, True), ("c", 0, 10, False)]


def test_a_running_decode_is_never_starved_by_prompt_chunks() -> None:
    desk = Desk(num_blocks=256, budget=8, max_num_seqs=8)
    decode = desk.prompt("a", 3, 11)
    desk.step()
    for index in range(6):
        desk.prompt(f"long{index}", 60, 20 + index)
    for _ in range(20):
        plan = desk.step()
        assert plan.chunks[0].request is decode
        assert plan.num_tokens == 8


def test_a_budget_smaller_than_the_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="starve"):
        Desk(max_num_seqs=8, budget=4)


def test_no_more_requests_run_than_there_are_rows() -> None:
    desk = Desk(max_num_seqs=2)
    first, *_ = (desk.prompt(name, 3, index + 10) for index, name in enumerate("abc"))
    assert [key for key, *_ in shape(desk.step())] == ["a", "b"]
    desk.scheduler.finish(first, FinishReason.STOP)
    assert [key for key, *_ in shape(desk.step())] == ["b", "c"]


def test_a_request_without_room_is_not_overtaken_by_a_smaller_one() -> None:
    desk = Desk(num_blocks=6)
    big, waiting, small = desk.prompt("a", 15, 10), desk.prompt("b", 12, 11), desk.prompt("c", 2, 12)
    desk.step()
    assert waiting.state is small.state is RequestState.WAITING
    desk.scheduler.finish(big, FinishReason.STOP)
    desk.step()
    assert waiting.state is small.state is RequestState.RUNNING


def test_a_request_waiting_for_its_grammar_holds_nothing_and_holds_nobody_up() -> None:
    desk = Desk()
    tokens = list(range(1, 10))
    waiting = desk.add(ask("a", tokens, constraint=up_to(3), reference=reference_to(tokens, BLOCK_SIZE)))[0]
    desk.prompt("b", 3)
    plan = desk.step()
    assert [key for key, *_ in shape(plan)] == ["b"]
    assert plan.pulls == ()
    assert len(waiting.holding.table) == 0
    desk.scheduler.grammar_ready(waiting)
    assert [pull.request_id for pull in desk.step().pulls] == ["a"]
    assert waiting.timeline.between_s(Event.GRAMMAR_READY, Event.PULL_STARTED) is not None


def test_a_pull_covers_all_but_the_last_prompt_token_and_only_what_is_not_cached() -> None:
    desk = Desk()
    desk.prompt("a", 9)
    desk.step()
    tokens = [1, *range(1, 9), 50, 51, 52]
    request = desk.add(ask("b", tokens, reference=reference_to(tokens, BLOCK_SIZE)))[0]
    (pull,) = desk.step().pulls
    assert (pull.start_token, pull.end_token) == (8, 11)
    assert list(pull.block_ids) == request.holding.table.slice(2, 3)
    assert desk.settle(request, PullStatus.DONE) is None
    assert shape(desk.step())[-1] == ("b", 11, 1, True)
    assert (request.num_prefix_tokens, request.num_pulled_tokens) == (8, 3)


@pytest.mark.parametrize("length", [BLOCK_SIZE * 3 - 1, BLOCK_SIZE * 3, BLOCK_SIZE * 3 + 1, BLOCK_SIZE * 3 + 2])
def test_pulled_blocks_are_exactly_those_of_the_pulled_tokens(length: int) -> None:
    desk = Desk()
    request = desk.remote("a", length)
    (pull,) = desk.step().pulls
    assert pull.end_token == length - 1
    assert len(pull.block_ids) == -(-(length - 1) // BLOCK_SIZE)
    desk.settle(request, PullStatus.DONE)
    assert shape(desk.step()) == [("a", length - 1, 1, True)]


def test_when_everything_but_the_last_token_is_cached_the_peer_is_let_go() -> None:
    desk = Desk()
    desk.prompt("a", 9)
    desk.step()
    tokens = [1, *range(1, 9)]
    desk.add(ask("b", tokens, reference=reference_to(tokens, BLOCK_SIZE)))
    plan = desk.step()
    assert plan.pulls == ()
    assert plan.abandoned == ("b",)
    assert shape(plan)[-1] == ("b", 8, 1, True)


def test_a_prompt_of_one_token_needs_no_pull() -> None:
    desk = Desk()
    desk.remote("a", 1)
    plan = desk.step()
    assert (plan.pulls, plan.abandoned) == ((), ("a",))
    assert shape(plan) == [("a", 0, 1, True)]


def test_a_reference_that_holds_less_than_the_prompt_is_pulled_and_the_rest_computed() -> None:
    desk = Desk()
    tokens = list(range(1, 13))
    request = desk.add(ask("a", tokens, reference=reference_to(tokens, BLOCK_SIZE, num_tokens=6)))[0]
    (pull,) = desk.step().pulls
    assert (pull.end_token, len(pull.block_ids)) == (6, 2)
    desk.settle(request, PullStatus.DONE)
    assert shape(desk.step()) == [("a", 6, 6, True)]


@pytest.mark.parametrize("status", [PullStatus.FAILED, PullStatus.CANCELLED])
def test_a_failed_pull_frees_its_blocks_lets_the_peer_go_and_computes_here(status: PullStatus) -> None:
    desk = Desk()
    request = desk.remote("a", 9)
    desk.step()
    assert desk.kv.num_in_use == 3
    assert desk.settle(request, status) is request
    assert desk.kv.num_in_use == 0
    plan = desk.step()
    assert plan.abandoned == ("a",)
    assert shape(plan) == [("a", 0, 9, True)]
    assert desk.scheduler.counters.prompt_tokens_pulled == 0


def test_failed_bytes_are_never_found_as_a_prefix() -> None:
    desk = Desk()
    request = desk.remote("a", 9)
    desk.step()
    desk.settle(request, PullStatus.FAILED)
    assert desk.kv.find_prefix(request.holding, request.token_ids) == []


def test_blocks_under_a_running_pull_stay_reserved_after_an_abort() -> None:
    desk = Desk()
    request = desk.remote("a", 9)
    desk.step()
    desk.scheduler.finish(request, FinishReason.ABORTED)
    plan = desk.step()
    assert plan.cancelled == ("a",)
    assert desk.kv.num_in_use == 3
    desk.settle(request, PullStatus.CANCELLED)
    assert desk.kv.num_in_use == 0
    assert desk.step().abandoned == ("a",)


def test_an_unknown_outcome_changes_nothing() -> None:
    desk = Desk()
    assert desk.settle(desk.prompt("a", 3), PullStatus.DONE) is None


@pytest.mark.parametrize("constraint", [None, up_to(2)])
def test_leaving_before_the_pull_lets_the_peer_go(constraint: object) -> None:
    desk = Desk(max_num_seqs=1)
    tokens = list(range(1, 9))
    request = ask("a", tokens, constraint=constraint, reference=reference_to(tokens, BLOCK_SIZE))  # type: ignore[arg-type]  # parametrised
    (member,) = desk.add(request)
    desk.scheduler.finish(member, FinishReason.ABORTED)
    assert desk.step().abandoned == ("a",)


def test_the_last_come_is_preempted_first_and_comes_back_with_its_output() -> None:
    desk = Desk(num_blocks=6, prefix_cache=False)
    old, young = desk.prompt("a", 7, 10), desk.prompt("b", 7, 20)
    desk.step()
    assert old.state is young.state is RequestState.RUNNING
    while young.state is RequestState.RUNNING:
        plan = desk.step()
    assert "b" in plan.left
    assert old.state is RequestState.RUNNING
    assert young.state is RequestState.PREEMPTED
    num_tokens = young.num_tokens
    assert young.num_output_tokens > 0
    desk.scheduler.finish(old, FinishReason.STOP)
    assert shape(desk.step()) == [("b", 0, num_tokens, True)]
    assert desk.scheduler.counters.num_preemptions == 1


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    desk = Desk(num_blocks=6)
    old, young = desk.prompt("a", 7, 10), desk.prompt("b", 7, 20)
    while young.state is not RequestState.PREEMPTED:
        desk.step()
    desk.scheduler.finish(old, FinishReason.STOP)
    ((key, start, *_),) = shape(desk.step())
    assert key == "b"
    assert start >= BLOCK_SIZE


def test_the_only_request_that_runs_out_of_room_waits_for_the_others_pull() -> None:
    desk = Desk(num_blocks=7)
    alone = desk.prompt("a", 8, 10)
    desk.step()
    pulling = desk.remote("b", 9)
    while alone.state is RequestState.RUNNING:
        desk.step()
    assert pulling.state is RequestState.WAITING_FOR_REMOTE_KV
    assert desk.step().chunks == ()
    desk.settle(pulling, PullStatus.DONE)
    assert [key for key, *_ in shape(desk.step())] == ["b"]
    desk.scheduler.finish(pulling, FinishReason.STOP)
    assert [key for key, *_ in shape(desk.step())] == ["a"]


def test_choices_share_one_prefill_and_copy_only_the_partial_block() -> None:
    desk = Desk(budget=64)
    leader, *others = desk.add(ask("a", list(range(1, 11)), greedy(4, n=3)))
    assert shape(desk.step()) == [("a", 0, 9, False)]
    plan = desk.step()
    assert shape(plan) == [("a", 9, 1, True), ("a#1", 9, 1, True), ("a#2", 9, 1, True)]
    assert [(copy.source, copy.target) for copy in plan.copies] == [
        (leader.holding.table[2], other.holding.table[2]) for other in others
    ]
    assert desk.kv.num_in_use == 2 + 3
    assert desk.scheduler.counters.prompt_tokens_computed == 12


def test_choices_share_one_pull() -> None:
    desk = Desk(budget=64)
    tokens = list(range(1, 10))
    leader, *_ = desk.add(ask("a", tokens, greedy(4, n=3), reference=reference_to(tokens, BLOCK_SIZE)))
    assert len(desk.step().pulls) == 1
    desk.settle(leader, PullStatus.DONE)
    plan = desk.step()
    assert shape(plan) == [("a", 8, 1, True), ("a#1", 8, 1, True), ("a#2", 8, 1, True)]
    assert plan.copies == ()


def test_a_choice_that_finds_no_row_forks_later_from_whoever_still_runs() -> None:
    desk = Desk(max_num_seqs=2, prefix_cache=False)
    leader, second, third = desk.add(ask("a", list(range(1, 11)), greedy(8, n=3)))
    desk.step()
    desk.step()
    assert third.state is RequestState.WAITING
    desk.scheduler.finish(leader, FinishReason.STOP)
    plan = desk.step()
    assert ("a#2", 9, 1, True) in shape(plan)
    assert plan.copies[0].source == second.holding.table[2]


def test_choices_that_never_forked_end_with_their_leader() -> None:
    desk = Desk()
    leader, *others = desk.add(ask("a", list(range(1, 40)), greedy(4, n=3)))
    desk.step()
    assert desk.scheduler.finish(leader, FinishReason.ABORTED) == [leader, *others]
    assert all(member.is_finished for member in (leader, *others))
    assert desk.step().chunks == ()
    assert desk.kv.num_in_use == 0


def test_prompt_logprobs_skip_no_token_and_bound_the_logits_of_a_step() -> None:
    desk = Desk(num_blocks=512, budget=1024)
    desk.prompt("a", 600)
    desk.step()
    request = desk.prompt("b", 600, prompt_logprobs=1)
    num_rows = []
    while request.num_uncomputed_tokens > 1 or request.num_output_tokens == 0:
        plan = desk.step()
        chunk = plan.chunks[-1]
        num_rows.append(chunk.num_prompt_logits)
        assert request.prompt_logprobs is not None
        request.prompt_logprobs += [None] * chunk.num_prompt_logits
    assert sum(num_rows) == 599
    assert max(num_rows) <= MAX_PROMPT_LOGITS_PER_STEP


def test_a_request_is_reported_as_started_once() -> None:
    desk = Desk()
    desk.prompt("a", 20)
    assert desk.step().started == ("a",)
    assert desk.step().started == ()

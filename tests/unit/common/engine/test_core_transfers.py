"""KV that comes from a peer or is left for one, seen from the core."""

import pytest

from common.engine.ports import PullStatus
from common.engine.request_state import FinishReason
from common.errors import (
    InvalidRequest,
    NotSupported,
    ReferenceRefused,
    TransferError,
)
from common.telemetry.timeline import Event, stages_s
from tests.support.fake_engine import ask, greedy, make_engine
from tests.support.fake_grammar import up_to
from tests.support.fake_kv import reference_to
from tests.support.fake_model import continuation

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]


def test_a_pull_starts_only_once_the_grammar_is_ready() -> None:
    engine = make_engine(auto=False)
    engine.add(ask("a", PROMPT, greedy(8), constraint=up_to(3), reference=reference_to(PROMPT, 4)))
    engine.run()
    assert engine.source.expected == ["a"]
    assert engine.source.plans == []
    engine.grammars.tickets[0].settle()
    engine.run()
    assert [plan.request_id for plan in engine.source.plans] == ["a"]
    engine.source.settle("a")
    engine.run()
    assert engine.answers.finish("a") is FinishReason.STOP
    assert len(engine.answers.tokens("a")) == 4


def test_the_timeline_of_a_constrained_remote_request_has_every_stage_in_order() -> None:
    engine = make_engine(auto=False)
    request = ask("a", PROMPT, greedy(8), clock=engine.clock, constraint=up_to(3), reference=reference_to(PROMPT, 4))
    engine.add(request)
    engine.step()
    engine.grammars.tickets[0].settle()
    engine.step()
    engine.source.settle("a")
    engine.run()
    assert list(stages_s(request.timeline)) == ["front", "grammar", "queue", "pull", "schedule", "compute"]
    at = request.timeline.at_s
    assert at[Event.GRAMMAR_READY] <= at[Event.PULL_STARTED] < at[Event.PULL_DONE] <= at[Event.SCHEDULED]
    assert sum(stages_s(request.timeline).values()) == pytest.approx(at[Event.FIRST_TOKEN] - at[Event.RECEIVED])


@pytest.mark.parametrize("length", [3, 4, 5, 8, 9, 30])
def test_a_handed_off_prompt_keeps_its_blocks_until_the_lease_ends(length: int) -> None:
    engine = make_engine()
    prompt = [(i % 50) + 1 for i in range(length)]
    engine.add(ask("a", prompt, greedy(1, ignore_stops=True), hand_off=True))
    engine.run()
    end = engine.answers.end("a")
    assert end is not None
    assert end.finish is FinishReason.HANDED_OFF
    assert end.handoff is not None
    assert len(end.handoff.remote_block_ids) == -(-length // 4)
    assert list(end.token_ids) == continuation(prompt, 1)
    status = engine.core.status()
    assert (status.num_blocks_in_use, status.num_leases_pinned) == (-(-length // 4), 1)
    for position, token in enumerate(prompt):
        block = end.handoff.remote_block_ids[position // 4]
        assert engine.storage.tensor[block, 0, 0, position % 4, 0, 0] == token
    engine.sink.release(end.handoff.lease_id)
    engine.step()
    engine.sink.released.append(end.handoff.lease_id)
    engine.step()
    assert engine.core.status().num_blocks_in_use == 0


def test_a_reader_that_left_in_the_step_of_its_handoff_leaves_no_lease_behind() -> None:
    engine = make_engine()
    request = ask("a", PROMPT, greedy(1, ignore_stops=True), hand_off=True)
    engine.add(request)
    engine.run()
    assert engine.core.status().num_leases_pinned == 1
    engine.core.abort(request.request_id)  # it was on its way while the step ran
    engine.run()
    status = engine.core.status()
    assert (status.num_leases_pinned, status.num_blocks_in_use) == (0, 0)


def test_requests_wait_for_room_that_leases_hold_and_go_on_when_they_end() -> None:
    engine = make_engine(num_blocks=4, enable_prefix_cache=False)
    engine.add(ask("a", [1] * 12, greedy(1), hand_off=True))
    engine.run()
    engine.add(ask("b", [2] * 8, greedy(2)))
    engine.run()
    assert engine.answers.end("b") is None
    engine.sink.release(next(iter(engine.sink.held)))
    engine.run()
    assert engine.answers.tokens("b") == continuation([2] * 8, 2)


def test_a_failed_pull_is_recomputed_and_counted_on_an_otherwise_idle_engine() -> None:
    engine = make_engine(auto=False)
    engine.add(ask("a", PROMPT, reference=reference_to(PROMPT, 4)))
    engine.run()
    engine.source.settle("a", PullStatus.FAILED, cause="disconnected")
    engine.run()
    assert engine.answers.tokens("a") == continuation(PROMPT, 8)
    assert engine.core.status().fallbacks == {"disconnected": 1}
    assert engine.source.abandoned == ["a"]


def test_a_failed_pull_is_an_error_where_the_policy_says_so() -> None:
    engine = make_engine(auto=False, on_pull_failure="fail")
    engine.add(ask("a", PROMPT, reference=reference_to(PROMPT, 4)))
    engine.run()
    engine.source.settle("a", PullStatus.FAILED, cause="timeout")
    engine.run()
    end = engine.answers.end("a")
    assert end is not None
    assert isinstance(end.error, TransferError)
    assert engine.core.status().num_blocks_in_use == 0


def test_a_pull_refused_at_once_is_recomputed_without_any_other_traffic() -> None:
    engine = make_engine()
    engine.source.refuse_pulls = True
    engine.add(ask("a", PROMPT, reference=reference_to(PROMPT, 4)))
    engine.run()
    assert engine.answers.tokens("a") == continuation(PROMPT, 8)
    assert engine.core.status().fallbacks == {"refused": 1}


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_reference_its_source_refuses_follows_the_policy(policy: str) -> None:
    engine = make_engine(on_pull_failure=policy)
    engine.source.refuse = ReferenceRefused("stale")
    engine.add(ask("a", PROMPT, reference=reference_to(PROMPT, 4)))
    engine.run()
    if policy == "recompute":
        assert engine.answers.tokens("a") == continuation(PROMPT, 8)
    else:
        end = engine.answers.end("a")
        assert end is not None
        assert isinstance(end.error, ReferenceRefused)
    assert "a" in engine.source.abandoned


def test_an_abort_in_the_middle_of_a_pull_never_lets_others_have_its_blocks() -> None:
    engine = make_engine(num_blocks=6, auto=False)
    engine.add(ask("a", PROMPT, reference=reference_to(PROMPT, 4)))
    engine.step()
    engine.core.abort(ask("a", PROMPT).request_id)
    engine.add(ask("b", [3] * 9, greedy(3)))
    engine.step()
    engine.source.settle("a", PullStatus.CANCELLED)
    engine.run()
    assert engine.source.cancelled == ["a"]
    assert engine.answers.tokens("b") == continuation([3] * 9, 3)
    assert engine.core.status().num_blocks_in_use == 0


def test_a_late_pull_is_recomputed_at_once_and_its_blocks_stay_reserved_until_the_bytes_have_come() -> None:
    engine = make_engine(num_blocks=12, auto=False)
    engine.add(ask("a", PROMPT, greedy(3), reference=reference_to(PROMPT, 4)))
    engine.step()
    (plan,) = engine.source.plans
    engine.source.late(plan.request_id)
    engine.run()
    assert engine.answers.tokens("a") == continuation(PROMPT, 3)
    status = engine.core.status()
    assert (status.num_draining, status.fallbacks) == (1, {"timeout": 1})
    assert status.num_blocks_in_use >= len(plan.block_ids)
    engine.add(ask("b", [3] * 9, greedy(3)))
    engine.step()
    engine.source.settle(plan.request_id)  # the bytes land, into blocks that are nobody else's
    engine.run()
    assert engine.answers.tokens("b") == continuation([3] * 9, 3)
    status = engine.core.status()
    assert (status.num_draining, status.num_blocks_in_use) == (0, 0)
    assert engine.source.abandoned == ["a"]


def test_a_late_pull_is_an_error_where_the_policy_says_so_and_its_blocks_follow_later() -> None:
    engine = make_engine(auto=False, on_pull_failure="fail")
    engine.add(ask("a", PROMPT, reference=reference_to(PROMPT, 4)))
    engine.step()
    engine.source.late(engine.source.plans[0].request_id)
    engine.run()
    end = engine.answers.end("a")
    assert end is not None
    assert isinstance(end.error, TransferError)
    assert engine.core.status().num_blocks_in_use > 0
    engine.source.settle(engine.source.plans[0].request_id)
    engine.run()
    assert engine.core.status().num_blocks_in_use == 0


def test_the_first_delta_says_where_the_prompt_came_from() -> None:
    engine = make_engine()
    engine.add(ask("a", PROMPT, reference=reference_to(PROMPT, 4)))
    engine.run()
    engine.add(ask("b", [*PROMPT, 44, 45, 46], reference=reference_to([*PROMPT, 44, 45, 46], 4)))
    engine.run()
    first, second = engine.answers.deltas["a", 0][0], engine.answers.deltas["b", 0][0]
    assert (first.num_cached_tokens, first.num_pulled_tokens) == (8, 8)
    assert (second.num_cached_tokens, second.num_pulled_tokens) == (11, 3)
    status = engine.core.status()
    assert (status.prompt_tokens_computed, status.prompt_tokens_prefix_hit, status.prompt_tokens_pulled) == (2, 8, 11)


def test_a_reference_to_another_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        make_engine().core.check(ask("a", [1, 2, 3], reference=reference_to([1, 2, 4], 4)))


def test_an_engine_without_ports_says_that_it_cannot() -> None:
    engine = make_engine()
    engine.core._source = engine.core._sink = None
    with pytest.raises(NotSupported):
        engine.core.check(ask("a", [1, 2], reference=reference_to([1, 2], 4)))
    with pytest.raises(NotSupported):
        engine.core.check(ask("a", [1, 2], hand_off=True))


def test_a_sink_that_refuses_ends_the_request_and_keeps_no_block() -> None:
    engine = make_engine()

    def refuse(*_: object) -> None:
        raise TransferError("no more leases")

    engine.sink.hand_off = refuse  # type: ignore[method-assign, assignment]  # the fake's refusal
    engine.add(ask("a", PROMPT, greedy(1), hand_off=True))
    engine.run()
    assert engine.answers.finish("a") is FinishReason.ERROR
    assert engine.core.status().num_blocks_in_use == 0

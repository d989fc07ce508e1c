import pytest

from common.engine.admission import make_choices
from common.engine.request_state import FinishReason, RequestState
from common.errors import IllegalTransition
from common.telemetry.timeline import Event
from tests.support.fake_engine import ask, greedy
from tests.support.fake_grammar import up_to


def test_an_illegal_move_is_refused_and_changes_nothing() -> None:
    (request,) = make_choices(ask("a", [1]), 0, frozenset())
    with pytest.raises(IllegalTransition):
        request.move_to(RequestState.PREEMPTED)
    assert request.state is RequestState.WAITING


def test_moves_mark_the_timeline() -> None:
    (request,) = make_choices(ask("a", [1], constraint=up_to(1)), 0, frozenset())
    for state in (
        RequestState.WAITING_FOR_GRAMMAR,
        RequestState.WAITING,
        RequestState.WAITING_FOR_REMOTE_KV,
        RequestState.RUNNING,
    ):
        request.move_to(state)
    request.finish(FinishReason.HANDED_OFF)
    assert list(request.timeline.at_s) == [
        Event.RECEIVED,
        Event.GRAMMAR_READY,
        Event.PULL_STARTED,
        Event.PULL_DONE,
        Event.HANDED_OFF,
        Event.FINISHED,
    ]


def test_a_failed_pull_leaves_no_pull_done() -> None:
    (request,) = make_choices(ask("a", [1]), 0, frozenset())
    request.move_to(RequestState.WAITING_FOR_REMOTE_KV)
    request.move_to(RequestState.WAITING)
    assert Event.PULL_DONE not in request.timeline.at_s


def test_nothing_ends_twice() -> None:
    (request,) = make_choices(ask("a", [1]), 0, frozenset())
    request.finish(FinishReason.STOP)
    with pytest.raises(IllegalTransition):
        request.finish(FinishReason.ABORTED)
    assert request.finish_reason is FinishReason.STOP


def test_choices_have_their_own_keys_and_reproducible_seeds() -> None:
    first = make_choices(ask("a", [1], greedy(4, n=3)), 0, frozenset())
    again = make_choices(ask("b", [1], greedy(4, n=3)), 7, frozenset())
    assert [request.key for request in first] == ["a", "a#1", "a#2"]
    assert len({request.seed for request in first}) == 3
    assert [request.seed for request in first] == [request.seed for request in again]


def test_a_request_without_a_seed_draws_one() -> None:
    params = greedy(4)
    unseeded = [make_choices(ask("a", [1], type(params)(max_tokens=2)), 0, frozenset())[0].seed for _ in range(2)]
    assert unseeded[0] != unseeded[1]

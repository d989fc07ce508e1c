import pytest

from common.engine.admission import make_choices
from common.engine.request_state import FinishReason
from common.engine.sampling.params import RepetitionDetection, SamplingParams
from common.engine.scheduling.sequence import Request
from common.engine.stop import Ending, check_stop
from tests.support.fake_engine import ask, greedy
from tests.support.fake_grammar import FakeMatcher

EOS_IDS = frozenset({0, 99})


def after(output: list[int], params: SamplingParams, *, hand_off: bool = False) -> Request:
    (request,) = make_choices(ask("a", [1, 2], params, hand_off=hand_off), 0, EOS_IDS)
    request.token_ids += output
    return request


@pytest.mark.parametrize(
    ("output", "params", "ending"),
    [
        ([5], greedy(3), None),
        ([5, 0], greedy(3), Ending(FinishReason.STOP)),
        ([5, 99], greedy(3), Ending(FinishReason.STOP)),
        ([5, 7], greedy(3, stop_token_ids=(7,)), Ending(FinishReason.STOP, 7)),
        ([5, 0], greedy(3, stop_token_ids=(0,)), Ending(FinishReason.STOP)),
        ([5, 0], greedy(3, stop_token_ids=(0,), ignore_eos=True), Ending(FinishReason.STOP, 0)),
        ([5, 0], greedy(3, ignore_eos=True), None),
        ([5, 0], greedy(3, ignore_stops=True, stop_token_ids=(0,)), None),
        ([5, 0], greedy(3, min_tokens=3), None),
        ([5, 5, 0], greedy(3, min_tokens=3), Ending(FinishReason.STOP)),
        ([5, 5, 7], greedy(3, stop_token_ids=(7,)), Ending(FinishReason.STOP, 7)),
        ([5, 5, 5], greedy(3), Ending(FinishReason.LENGTH)),
    ],
)
def test_an_output_ends_on_its_last_token_and_a_stop_wins_over_the_length(
    output: list[int], params: SamplingParams, ending: Ending | None
) -> None:
    assert check_stop(after(output, params), EOS_IDS, 1000) == ending


def test_the_context_length_ends_an_output_too() -> None:
    assert check_stop(after([5], greedy(100)), EOS_IDS, 3) == Ending(FinishReason.LENGTH)


def test_a_grammar_that_ended_stops_even_before_min_tokens() -> None:
    request = after([5, 0], greedy(50, min_tokens=20))
    request.matcher = FakeMatcher(1, frozenset({5}), EOS_IDS, accepted=[5, 0])
    assert check_stop(request, EOS_IDS, 1000) == Ending(FinishReason.STOP)


def test_a_handed_off_prompt_ends_with_its_first_token_whatever_it_is() -> None:
    request = after([0], greedy(1, ignore_stops=True), hand_off=True)
    assert check_stop(request, EOS_IDS, 1000) == Ending(FinishReason.HANDED_OFF)


@pytest.mark.parametrize(
    ("output", "repeats"),
    [
        ([5, 6, 5, 6], True),
        ([5, 6, 5, 7, 5], False),
        ([9, 7, 7], False),
        ([1, 1, 1], False),
        ([5, 6, 7, 5, 6, 7], True),
    ],
)
def test_an_output_that_repeats_itself_ends(output: list[int], repeats: bool) -> None:
    rule = RepetitionDetection(min_pattern_size=2, max_pattern_size=3, min_count=2)
    ending = check_stop(after(output, greedy(50, repetition_detection=rule)), EOS_IDS, 1000)
    assert (ending == Ending(FinishReason.REPETITION)) is repeats

"""How long the next draft may be."""

from common.engine.speculation.pace import LONGEST_PAUSE_STEPS, DraftPace


def steps_until_a_draft(pace: DraftPace) -> int:
    num_steps = 0
    while not pace.may_draft():
        num_steps += 1
    return num_steps


def test_drafts_that_hold_grow_to_the_most_that_is_allowed() -> None:
    pace, lengths = DraftPace(5, first_tokens=2), []
    for _ in range(4):
        lengths.append(pace.length_tokens)
        pace.settle(pace.length_tokens, pace.length_tokens)
    assert lengths == [2, 4, 5, 5]


def test_a_draft_that_holds_in_part_is_followed_by_one_as_long_as_what_held() -> None:
    pace = DraftPace(8, first_tokens=2)
    pace.settle(8, 3)
    assert pace.length_tokens == 3
    assert pace.may_draft()


def test_a_request_that_cannot_be_guessed_is_left_alone_ever_longer_but_not_for_ever() -> None:
    pace, pauses = DraftPace(4, first_tokens=2), []
    for _ in range(7):
        pace.settle(2, 0)
        pauses.append(steps_until_a_draft(pace))
    assert pauses == [1, 3, 7, 15, 31, LONGEST_PAUSE_STEPS, LONGEST_PAUSE_STEPS]


def test_one_right_guess_ends_the_mistrust() -> None:
    pace = DraftPace(4, first_tokens=2)
    for _ in range(3):
        pace.settle(2, 0)
    steps_until_a_draft(pace)
    pace.settle(1, 1)
    pace.settle(2, 0)
    assert steps_until_a_draft(pace) == 1

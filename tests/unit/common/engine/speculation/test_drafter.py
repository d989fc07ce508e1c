"""Which guesses a decode gets to check."""

from common.config.engine import SpeculativeConfig
from common.engine.admission import make_choices
from common.engine.scheduling.sequence import Request
from common.engine.speculation.drafter import Drafter
from tests.support.fake_engine import ask, greedy
from tests.support.fake_grammar import FakeMatcher, up_to

STOP = 0
SAID = [1, 2, 3, 4, 5, 1, 2, 3]
BOTH = SpeculativeConfig(method="grammar+ngram", num_speculative_tokens=4)


def decode(tokens: list[int] = SAID, max_tokens: int = 20, matcher: FakeMatcher | None = None) -> Request:
    """A request that has said one token beyond its prompt."""
    constraint = None if matcher is None else up_to(matcher.length)
    request = ask("r", tokens[:-1], greedy(max_tokens), constraint=constraint)
    choice = make_choices(request, 0, frozenset({STOP}))[0]
    choice.token_ids.append(tokens[-1])
    choice.matcher = matcher
    return choice


def drafted(request: Request, config: SpeculativeConfig = BOTH, limit: int = 10, context: int = 100) -> tuple[int, ...]:
    return Drafter(config, context).draft(request, limit)


def matcher_of(length: int, *allowed: int) -> FakeMatcher:
    return FakeMatcher(length, frozenset(allowed), frozenset({STOP}))


def test_a_free_text_gets_what_followed_its_last_tokens_before() -> None:
    assert drafted(decode()) == (4, 5)


def test_a_grammar_without_a_choice_is_asked_first() -> None:
    assert drafted(decode(matcher=matcher_of(9, 7))) == (7, 7, 7, 7), "and trusted from the first draft on"
    only_text = SpeculativeConfig(method="ngram")
    assert drafted(decode(matcher=matcher_of(9, *range(1, 9))), only_text) == (4, 5)


def test_with_a_choice_the_text_is_asked_and_the_grammar_cuts_what_it_refuses() -> None:
    assert drafted(decode(matcher=matcher_of(9, *range(1, 9)))) == (4, 5)
    assert drafted(decode(matcher=matcher_of(9, 4, 6))) == (4,)
    assert drafted(decode(matcher=matcher_of(9, 6, 7))) == ()


def test_a_grammar_library_that_breaks_gives_no_draft_and_breaks_nothing_else() -> None:
    matcher = matcher_of(9, 7)
    matcher.raises = RuntimeError("the library is on fire")
    assert drafted(decode(matcher=matcher)) == ()


def test_asking_does_not_move_the_grammar() -> None:
    matcher = matcher_of(9, 7)
    drafted(decode(matcher=matcher))
    assert matcher.accepted == []


def test_only_the_named_ones_guess() -> None:
    assert drafted(decode(), SpeculativeConfig(method="grammar")) == ()
    assert drafted(decode(matcher=matcher_of(9, 7)), SpeculativeConfig(method="ngram")) == ()


def test_a_stop_token_is_never_drafted() -> None:
    assert drafted(decode([1, 2, 3, 4, STOP, 1, 2, 3])) == (4,)
    assert drafted(decode([1, 2, 3, STOP, 5, 1, 2, 3])) == ()


def test_no_draft_reaches_beyond_max_tokens_the_context_or_what_there_is_room_for() -> None:
    assert drafted(decode(max_tokens=3)) == (4,)
    assert drafted(decode(max_tokens=2)) == ()
    assert drafted(decode(), context=len(SAID) + 2) == (4,)
    assert drafted(decode(), limit=1) == (4,)
    assert drafted(decode(), limit=0) == ()


def test_wrong_guesses_of_one_do_not_hold_the_other_up() -> None:
    drafter, request = Drafter(BOTH, 100), decode(matcher=matcher_of(9, *range(1, 9)))
    assert drafter.draft(request, 10) == (4, 5)
    drafter.settle(request, 2, 0)
    request.matcher = matcher_of(9, 7)
    assert drafter.draft(request, 10) == (7, 7, 7, 7)


def test_how_drafts_fare_sets_how_long_the_next_ones_are() -> None:
    request, drafter = decode(), Drafter(BOTH, 100)
    assert len(drafter.draft(request, 10)) == 2
    drafter.settle(request, 2, 2)
    assert len(drafter.draft(request, 10)) == 4
    drafter.settle(request, 4, 0)
    assert drafter.draft(request, 10) == ()

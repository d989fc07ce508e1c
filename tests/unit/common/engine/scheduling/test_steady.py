from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import given, settings

from common.engine.outputs import TokenDelta
from common.engine.scheduling.sequence import Request
from common.ids import RequestId
from tests.support.engine_actions import ACTIONS
from tests.support.fake_engine import FakeEngine, ask, greedy, make_engine
from tests.support.fake_grammar import up_to


@dataclass
class NeverDrafts:
    """A `DraftSource` that has to be asked for every decode, so that every plan is made the long way."""

    max_batch: int = 100
    asked: list[str] = field(default_factory=list)

    def draft(self, request: Request, limit: int) -> tuple[int, ...]:
        self.asked.append(request.key)
        return ()

    def settle(self, request: Request, num_drafted: int, num_right: int) -> None:
        raise AssertionError("there was no draft")


def step(engine: FakeEngine) -> tuple[tuple[TokenDelta, ...], tuple[str, ...], list[int]]:
    """What a step said, whom it scheduled for the first time, and the tokens of all forwards so far."""
    result = engine.core.step()
    engine.core.kv.check_integrity()
    return result.deltas, result.started, list(engine.model.num_tokens)


@settings(max_examples=60, deadline=None)
@given(st.lists(ACTIONS, max_size=14), st.integers(8, 16))
def test_a_short_plan_is_the_one_made_the_long_way(actions: list[tuple[str, int, int]], num_blocks: int) -> None:
    short, long = (make_engine(num_blocks, 4, max_num_seqs=3) for _ in range(2))
    long.core.scheduler.drafts = NeverDrafts()
    num_asked = 0
    for kind, first, second in [*actions, ("step", 200, 0)]:
        for engine in (short, long):
            if kind in ("add", "constrained"):
                constraint = up_to(second) if kind == "constrained" else None
                prompt = [(7 * num_asked + place) % 50 + 1 for place in range(first)]
                engine.add(ask(str(num_asked), prompt, greedy(second), constraint=constraint))
            elif kind == "abort":
                engine.core.abort(RequestId(str(first)))
        num_asked += kind in ("add", "constrained")
        for _ in range(first if kind == "step" else 0):
            assert step(short) == step(long)


def test_whoever_waits_is_let_in_by_the_next_plan_though_the_others_go_on_as_before() -> None:
    engine = make_engine()
    engine.add(ask("a", [1, 2], greedy(20, ignore_eos=True)))
    for _ in range(5):
        engine.step()
    engine.add(ask("b", [3], greedy(1, ignore_eos=True)))
    assert engine.core.step().started == ("b",)


def test_decodes_that_may_be_drafted_for_are_asked_about_in_every_step() -> None:
    engine, drafts = make_engine(), NeverDrafts(max_batch=1)
    engine.core.scheduler.drafts = drafts
    engine.add(ask("a", [1, 2], greedy(20, ignore_eos=True)))
    for _ in range(6):
        engine.step()
    assert drafts.asked == ["a"] * 5
    engine.add(ask("b", [3], greedy(20, ignore_eos=True)))
    for _ in range(6):
        engine.step()
    assert len(drafts.asked) == 6  # "b" comes in behind the decodes of its first step

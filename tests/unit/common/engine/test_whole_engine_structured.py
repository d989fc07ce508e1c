"""Real decoder, sampler and grammars: constrained and free requests in one batch that comes, goes and preempts."""

import random
import re
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from common.engine.request_state import FinishReason
from common.engine.sampling.params import SamplingParams
from common.engine.sampling.processors.thinking_budget import OutputMarkers
from common.engine.structured_output.grammar import CompileState
from common.engine.structured_output.thinking import Thinking
from common.ids import RequestId
from common.wire.constraint import Constraint, ConstraintKind
from tests.support.byte_tokenizer import EOS_TOKEN_ID, SPECIAL_TOKENS
from tests.support.fake_engine import greedy
from tests.support.grammars import make_service, settle
from tests.support.tiny_engine import TinyEngine
from tests.support.tiny_model import tiny_model

PATTERN = "[a-c]{20,30}-[0-9]{2}"
REGEX = Constraint(kind=ConstraintKind.REGEX, value=PATTERN)
EOS_IDS = frozenset({EOS_TOKEN_ID})


def prompt_of(number: int) -> list[int]:
    return [(i * 31 + number * 17) % 250 for i in range(6 + number)]


@pytest.mark.parametrize("min_tokens", [0, 40])
@pytest.mark.parametrize("n", [1, 2])
def test_constrained_outputs_match_and_free_ones_are_as_if_alone(n: int, min_tokens: int) -> None:
    loaded, service = tiny_model(), make_service()
    try:
        ticket = settle(service.compile(REGEX))
        assert ticket.state is CompileState.READY, ticket.error
        alone = TinyEngine(loaded, prefix_cache=False)
        free = [alone.alone(prompt_of(number), greedy(40)) for number in range(6)]
        engine = TinyEngine(loaded, num_blocks=16, max_num_seqs=8, budget=16, grammars=service, eos_token_ids=EOS_IDS)
        names = []
        for number in range(6):
            params = SamplingParams(temperature=1.0, seed=number, max_tokens=60, n=n, min_tokens=min_tokens)
            names.append(engine.ask(prompt_of(number), params, constraint=REGEX))
            names.append(engine.ask(prompt_of(number), greedy(40, ignore_eos=True)))
        engine.run()
        assert engine.core.status().num_preemptions > 0
        for number in range(6):
            constrained, plain = names[2 * number : 2 * number + 2]
            for index in range(n):
                *text, last = engine.answers.tokens(constrained, index)
                assert last == EOS_TOKEN_ID
                assert re.fullmatch(PATTERN, bytes(text).decode())
                assert engine.answers.finish(constrained, index) is FinishReason.STOP
            assert engine.answers.tokens(plain) == free[number]
    finally:
        service.close()


THINK, THOUGHT = SPECIAL_TOKENS["<think>"], SPECIAL_TOKENS["</think>"]


def test_thinking_runs_free_to_its_budget_and_the_grammar_begins_behind_it() -> None:
    service = make_service(thinking_marks=("<think>", "</think>"))
    try:
        settle(service.compile(REGEX))
        markers = OutputMarkers(think_start=(THINK,), think_end=(THOUGHT,), tool_start=(), tool_end=())
        engine = TinyEngine(tiny_model(), grammars=service, eos_token_ids=EOS_IDS, markers=markers)
        params = SamplingParams(temperature=1.0, seed=3, max_tokens=80, thinking_token_budget=12)
        thinker = engine.ask([*prompt_of(1), THINK], params, constraint=REGEX, thinking=Thinking.OPEN)
        other = engine.ask(prompt_of(2), params, constraint=REGEX, thinking=Thinking.NONE)
        engine.run()
        tokens = engine.answers.tokens(thinker)
        thought, answer = tokens[: tokens.index(THOUGHT)], tokens[tokens.index(THOUGHT) + 1 :]
        assert 0 < len(thought) <= 12
        assert EOS_TOKEN_ID not in thought
        for *text, last in (answer, engine.answers.tokens(other)):
            assert re.fullmatch(PATTERN, bytes(text).decode())
            assert last == EOS_TOKEN_ID
    finally:
        service.close()


NUM_EACH = 8
FREE_TOKENS = 24
BETWEEN = st.tuples(st.integers(0, 5), st.sampled_from([False, False, True]))
"""Steps until the next request is added, and whether one is cancelled then."""


@dataclass
class Crowd:
    """Requests of an engine with too few blocks for all of them, half of them constrained."""

    engine: TinyEngine
    constrained: list[str] = field(default_factory=list)
    free: dict[str, int] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)

    def add(self, number: int) -> None:
        if number % 2:
            params = SamplingParams(temperature=1.0, seed=number, max_tokens=60)
            self.constrained.append(self.engine.ask(prompt_of(number), params, constraint=REGEX))
        else:
            self.free[self.engine.ask(prompt_of(number), greedy(FREE_TOKENS, ignore_eos=True))] = number

    def cancel_one(self, chance: random.Random) -> None:
        alive = [name for name in [*self.constrained, *self.free] if self.engine.answers.finish(name) is None]
        if alive:
            name = chance.choice(sorted(alive))
            self.cancelled.add(name)
            self.engine.core.abort(RequestId(name))

    def step(self) -> None:
        self.engine.answers.take(self.engine.core.step().deltas)
        self.engine.core.kv.check_integrity()


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """What each free request says when nobody is beside it."""
    engine = TinyEngine(tiny_model(), prefix_cache=False)
    sampling = greedy(FREE_TOKENS, ignore_eos=True)
    return [engine.alone(prompt_of(number), sampling) for number in range(2 * NUM_EACH)]


@given(
    order=st.permutations(range(2 * NUM_EACH)),
    between=st.lists(BETWEEN, min_size=2 * NUM_EACH, max_size=2 * NUM_EACH),
    num_blocks=st.integers(14, 24),
    chance=st.randoms(use_true_random=False),
)
@settings(max_examples=12, deadline=None)
def test_rows_that_come_leave_and_are_preempted_keep_their_own_masks(
    alone: list[list[int]],
    order: list[int],
    between: list[tuple[int, bool]],
    num_blocks: int,
    chance: random.Random,
) -> None:
    service = make_service()
    try:
        settle(service.compile(REGEX))
        engine = TinyEngine(
            tiny_model(), num_blocks=num_blocks, max_num_seqs=8, budget=24, grammars=service, eos_token_ids=EOS_IDS
        )
        crowd = Crowd(engine)
        for number, (num_steps, cancels) in zip(order, between, strict=True):
            crowd.add(number)
            for _ in range(num_steps):
                crowd.step()
            if cancels:
                crowd.cancel_one(chance)
        engine.run()
        for name in crowd.constrained:
            text = bytes(token for token in engine.answers.tokens(name) if token != EOS_TOKEN_ID).decode()
            if engine.answers.finish(name) is FinishReason.STOP:
                assert re.fullmatch(PATTERN, text)
            else:
                assert name in crowd.cancelled
                assert re.fullmatch("[a-c]{0,30}(-[0-9]{0,2})?", text)
        for name, number in crowd.free.items():
            tokens = engine.answers.tokens(name)
            assert tokens == alone[number][: len(tokens)]
            assert len(tokens) == FREE_TOKENS or name in crowd.cancelled
    finally:
        service.close()

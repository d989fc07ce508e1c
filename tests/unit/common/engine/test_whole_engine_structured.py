"""Real decoder, sampler and grammars: constrained and free requests in one batch that comes, goes and preempts."""

import re

import pytest

from common.engine.request_state import FinishReason
from common.engine.sampling.params import SamplingParams
from common.engine.structured_output.grammar import CompileState
from common.wire.constraint import Constraint, ConstraintKind
from tests.support.byte_tokenizer import EOS_TOKEN_ID
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

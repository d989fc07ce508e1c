"""Random walks through the masks: whatever they allow from start to end is valid, whatever the rows' order."""

import json
import random
from typing import Any

import jsonschema
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from common.engine.structured_output.grammar import MaskRow, Matcher
from common.engine.structured_output.service import LocalGrammarService
from common.errors import ConstraintRejected
from tests.support.byte_tokenizer import EOS_TOKEN_ID
from tests.support.grammars import allowed, schema, start
from tests.support.schema_strategies import SCHEMAS

MAX_TOKENS = 400
CALM_AFTER = 40
CLOSERS = frozenset(b'"}]')


def next_token(service: LocalGrammarService, matcher: Matcher, rng: random.Random, num_tokens: int) -> int:
    """A random allowed token; after a while preferably one that leads to the end."""
    choices = sorted(allowed(service, matcher))
    assert choices, "the masks led into a dead end"
    closing = [token for token in choices if token in CLOSERS or token == EOS_TOKEN_ID]
    if closing and (num_tokens > CALM_AFTER or rng.random() < 0.2):
        return EOS_TOKEN_ID if EOS_TOKEN_ID in closing else rng.choice(closing)
    printable = [token for token in choices if 0x20 < token < 0x7F]
    return rng.choice(printable or choices)


def walk(service: LocalGrammarService, matcher: Matcher, rng: random.Random) -> str | None:
    """The text of one walk; None when it did not end in time."""
    tokens: list[int] = []
    while len(tokens) < MAX_TOKENS:
        token = next_token(service, matcher, rng, len(tokens))
        assert matcher.accept([token]), "the mask allowed what the matcher refuses"
        if token == EOS_TOKEN_ID:
            return bytes(tokens).decode()
        tokens.append(token)
    return None


@given(SCHEMAS, st.integers(0, 2**32))
@settings(max_examples=80, deadline=None)
def test_what_the_masks_allow_to_the_end_is_valid(
    service: LocalGrammarService, node: dict[str, Any], seed: int
) -> None:
    try:
        matcher = start(service, schema(json.dumps(node)))
    except ConstraintRejected as refused:
        assert refused.message  # noqa: PT017 refused by name is the other legal outcome
        assume(False)
    text = walk(service, matcher, random.Random(seed))
    assume(text is not None)
    jsonschema.validate(json.loads(str(text)), node, cls=jsonschema.Draft202012Validator)


@given(st.lists(SCHEMAS, min_size=2, max_size=5), st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_a_row_gets_its_own_mask_wherever_it_stands(
    service: LocalGrammarService, nodes: list[dict[str, Any]], rng: random.Random
) -> None:
    matchers: list[Matcher] = []
    for node in nodes:
        try:
            matchers.append(start(service, schema(json.dumps(node))))
        except ConstraintRejected:
            continue
    for _ in range(6):
        rng.shuffle(matchers)
        rows = [MaskRow(rng.randrange(64), matcher) for matcher in matchers]
        together = service.fill(rows).wait().clone()
        for row, matcher in zip(together, matchers, strict=True):
            alone = service.fill([MaskRow(0, matcher)]).wait()[0]
            assert row.equal(alone)
            if not matcher.is_terminated():
                assert matcher.accept([next_token(service, matcher, rng, 0)])

"""Every sampling parameter through prefill and decode on two engines: the same tokens, logprobs and text as on one.

And the same again when D checks drafts, whether they are right or wrong.
"""

from dataclasses import fields, replace

import msgspec
import numpy as np
import pytest

from common.engine.outputs import PositionLogprobs, TokenDelta
from common.engine.request_state import FinishReason
from common.engine.sampling.params import RepetitionDetection, SamplingParams
from common.engine.sampling.processors.thinking_budget import OutputMarkers
from common.engine.text_output import TextOutput
from tests.support.byte_tokenizer import ByteTokenizer
from tests.support.logits_processors import PreferToken
from tests.support.oracle_drafts import OracleDrafts
from tests.support.sampling_batch import random_case
from tests.support.tiny_engine import TinyEngine
from tests.support.tiny_model import tiny_model

VOCAB_SIZE = 272
MAX_TOKENS = 24
EOS = frozenset({256})
MARKERS = OutputMarkers(think_start=(259,), think_end=(260,))
PROMPT = [ord(letter) for letter in "repeat after me: hello hello"]


@pytest.fixture(scope="module")
def loaded():
    return tiny_model(VOCAB_SIZE)


def p_asks(params: SamplingParams) -> SamplingParams:
    """What the prefill leg leaves of the parameters (DESIGN §3)."""
    return replace(params, n=1, max_tokens=1, min_tokens=0, ignore_stops=True, logprobs=None, logprob_token_ids=None)


def engine_of(loaded, remote: TinyEngine | None = None) -> TinyEngine:
    return TinyEngine(loaded, remote=remote, eos_token_ids=EOS, processors=[PreferToken], markers=MARKERS)


def split(
    loaded, requests: list[tuple[list[int], SamplingParams]], drafts: OracleDrafts | None = None
) -> list[list[list[TokenDelta]]]:
    """Deltas per request and choice; all requests at once on both engines. `drafts` guesses for D."""
    p = engine_of(loaded)
    d = engine_of(loaded, remote=p)
    d.core.scheduler.drafts = drafts
    handed = [p.ask(prompt, p_asks(params), hand_off=True) for prompt, params in requests]
    p.run()
    names = [
        d.ask(prompt, params, reference=p.answers.end(name).handoff)
        for name, (prompt, params) in zip(handed, requests, strict=True)
    ]
    d.run()
    p.run()
    assert p.sink.held == {}
    assert d.source.num_pulled_tokens > 0
    return [deltas_of(d, name, params) for name, (_, params) in zip(names, requests, strict=True)]


def unsplit(loaded, prompt: list[int], params: SamplingParams) -> list[list[TokenDelta]]:
    engine = engine_of(loaded)
    name = engine.ask(prompt, params)
    engine.run()
    return deltas_of(engine, name, params)


def deltas_of(engine: TinyEngine, name: str, params: SamplingParams) -> list[list[TokenDelta]]:
    return [engine.answers.deltas[name, index] for index in range(params.n)]


def said(choices: list[list[TokenDelta]]) -> list[object]:
    """Tokens, reported tokens and end of every choice."""
    return [
        (
            [token for delta in deltas for token in delta.token_ids],
            [(entry.chosen.token_id, [other.token_id for other in entry.top]) for entry in logprobs_of(deltas)],
            deltas[-1].finish,
            deltas[-1].stop_reason,
        )
        for deltas in choices
    ]


def logprobs_of(deltas: list[TokenDelta]) -> list[PositionLogprobs]:
    return [entry for delta in deltas for entry in delta.logprobs]


def assert_same(choices: list[list[TokenDelta]], others: list[list[TokenDelta]], name: object) -> None:
    assert said(choices) == said(others), name
    for deltas, other_deltas in zip(choices, others, strict=True):
        ours, theirs = logprobs_of(deltas), logprobs_of(other_deltas)
        assert [entry.chosen.logprob for entry in ours] == pytest.approx(
            [entry.chosen.logprob for entry in theirs], abs=1e-4
        )


def text_of(deltas: list[TokenDelta], params: SamplingParams) -> tuple[str, FinishReason | None, int | str | None]:
    """What a client reads, and how it ends."""
    output, text = TextOutput(ByteTokenizer(), params), ""
    for delta in deltas:
        new = output.push(delta)
        text += new.text
        if new.finish is not None:
            return text, new.finish, new.stop_reason
    raise AssertionError("never ended")


def merged(deltas: list[TokenDelta]) -> TokenDelta:
    """All of a choice in one delta, as an answer in one piece sees it."""
    return msgspec.structs.replace(
        deltas[-1],
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
    )


def with_defaults(**changes: object) -> SamplingParams:
    return SamplingParams(**({"seed": 7, "max_tokens": MAX_TOKENS} | changes))  # type: ignore[arg-type] # named


SINGLE = {
    "greedy": with_defaults(temperature=0.0),
    "seed": with_defaults(),
    "negative seed": with_defaults(seed=-(1 << 63)),
    "temperature": with_defaults(temperature=1.7),
    "top_k": with_defaults(top_k=5),
    "top_p": with_defaults(top_p=0.5),
    "min_p": with_defaults(min_p=0.2),
    "repetition_penalty": with_defaults(temperature=0.0, repetition_penalty=1.8),
    "frequency_penalty": with_defaults(temperature=0.0, frequency_penalty=2.0),
    "negative frequency_penalty": with_defaults(temperature=0.0, frequency_penalty=-2.0),
    "presence_penalty": with_defaults(temperature=0.0, presence_penalty=2.0),
    "logit_bias": with_defaults(logit_bias=((101, 8.0), (102, -100.0))),
    "allowed_token_ids": with_defaults(allowed_token_ids=(97, 98, 99)),
    "bad_words": with_defaults(temperature=0.0, bad_words_token_ids=((108, 108), (104,))),
    "min_tokens": with_defaults(min_tokens=20, logit_bias=((256, 100.0),)),
    "eos": with_defaults(logit_bias=((256, 4.0),)),
    "ignore_eos": with_defaults(ignore_eos=True, logit_bias=((256, 4.0),)),
    "stop_token_ids": with_defaults(stop_token_ids=tuple(range(97, 123))),
    "stop": with_defaults(allowed_token_ids=(97, 98, 99), stop=("abc", "ca")),
    "included stop": with_defaults(allowed_token_ids=(97, 98, 99), stop=("bb",), include_stop_str_in_output=True),
    "logprobs": with_defaults(logprobs=3),
    "logprob_token_ids": with_defaults(logprob_token_ids=(5, 6, 7)),
    "n": with_defaults(n=3, temperature=1.0, seed=1),
    "vllm_xargs": with_defaults(temperature=0.0, extra_args={"prefer": 120}),
    "thinking_token_budget": with_defaults(thinking_token_budget=5, logit_bias=((259, 12.0),)),
    "skip_special_tokens": with_defaults(skip_special_tokens=False, logit_bias=((258, 12.0),)),
    "one token": with_defaults(max_tokens=1),
    "repetition_detection": with_defaults(
        allowed_token_ids=(97, 98), repetition_detection=RepetitionDetection(max_pattern_size=3, min_count=2)
    ),
}


def drafts_of(answers: list[list[list[TokenDelta]]]) -> OracleDrafts:
    """Drafts that are often right, for requests asked in the order of `answers` on an engine that asks nothing else."""
    truth = {
        (f"r{number}", index): merged(deltas).token_ids
        for number, choices in enumerate(answers)
        for index, deltas in enumerate(choices)
    }
    return OracleDrafts(truth, VOCAB_SIZE)


@pytest.mark.parametrize("has_drafts", [False, True])
def test_every_parameter_alone_gives_the_same_output_split_and_unsplit(loaded, has_drafts):
    requests = [(PROMPT, params) for params in SINGLE.values()]
    alone = [unsplit(loaded, prompt, params) for prompt, params in requests]
    drafts = drafts_of(alone) if has_drafts else None
    answers = split(loaded, requests, drafts)
    for name, (_, params), choices, expected in zip(SINGLE, requests, answers, alone, strict=True):
        assert_same(choices, expected, name)
        for deltas, others in zip(choices, expected, strict=True):
            assert text_of(deltas, params) == text_of([merged(others)], params), name
    assert drafts is None or 100 < drafts.num_right < drafts.num_drafted


def test_no_parameter_is_missing_among_those_compared():
    plain = SamplingParams()
    changed = {
        each.name
        for params in SINGLE.values()
        for each in fields(SamplingParams)
        if getattr(params, each.name) != getattr(plain, each.name)
    }
    # Of P alone; the words that bad_words_token_ids spell; what no detokenizer of ours adds in the first place.
    elsewhere = {"ignore_stops", "prompt_logprobs", "bad_words", "spaces_between_special_tokens"}
    assert changed | elsewhere == {each.name for each in fields(SamplingParams)}


@pytest.mark.parametrize("has_drafts", [False, True])
def test_one_hundred_random_combinations_give_the_same_output_split_and_unsplit(loaded, has_drafts):
    rng = np.random.default_rng(12)
    requests = []
    for number in range(100):
        case = random_case(rng, VOCAB_SIZE)
        params = replace(
            case.params,
            seed=number,
            max_tokens=MAX_TOKENS // 2,
            min_tokens=min(case.params.min_tokens, MAX_TOKENS // 2),
            logprobs=number % 3 if number % 2 else None,
            stop=("ab", "7") if number % 5 == 0 else (),
        )
        requests.append(([*PROMPT, *case.prompt], params))
    alone = [unsplit(loaded, prompt, params) for prompt, params in requests]
    drafts = drafts_of(alone) if has_drafts else None
    answers = split(loaded, requests, drafts)
    for number, ((_, params), choices, expected) in enumerate(zip(requests, answers, alone, strict=True)):
        assert_same(choices, expected, number)
        assert text_of(choices[0], params) == text_of([merged(expected[0])], params), number
    assert drafts is None or 100 < drafts.num_right < drafts.num_drafted


@pytest.mark.parametrize("name", ["stop", "included stop", "stop_token_ids", "eos", "seed"])
def test_streamed_text_equals_the_text_in_one_piece(loaded, name):
    params = SINGLE[name]
    deltas = unsplit(loaded, PROMPT, params)[0]
    assert len(deltas) > 1 or deltas[0].finish is FinishReason.STOP
    assert text_of(deltas, params) == text_of([merged(deltas)], params)


def test_three_choices_of_one_seed_differ_and_come_back_the_same(loaded):
    first, again = (said(split(loaded, [(PROMPT, SINGLE["n"])])[0]) for _ in range(2))
    assert first == again
    assert len({tuple(tokens) for tokens, *_ in first}) == 3

"""Inputs that broke other systems' sampling, one test for each kind: through P/D and on one engine, streamed and whole.

Through P/D, D checks drafts; the one engine does not: what is the same both ways is the same with speculation.

A1  token ids outside the vocabulary        test_a_field_that_cannot_be_served_is_refused_by_name_before_any_prefill
A2  bad or huge lists                       the same
A4  penalties on D, which never ran it      test_penalties_see_prompt_and_output_on_either_way
                                            test_penalties_count_every_token_of_a_draft_that_came_true
A5  stop strings over several tokens        test_no_part_of_a_stop_string_leaks_wherever_it_is_cut
A7  seeds, alone and in company             test_a_seed_gives_the_same_text_alone_in_company_and_on_either_way
A8  log probabilities of masked tokens      test_masked_alternatives_are_reported_with_a_finite_number
A9  thinking budget                         test_a_thinking_budget_forces_one_end_and_never_inside_a_tool_call
                                            test_thinking_opened_by_the_prompt_counts_on_d
A11 min_tokens with two EOS ids             test_min_tokens_holds_against_every_eos_id
I1  prompt_logprobs, echo                   test_log_probabilities_of_the_prompt_come_from_p
I3  n, best_of                              test_choices_differ_come_from_one_prefill_and_are_the_same_on_either_way
                                            test_a_choice_that_stops_early_leaves_its_siblings_as_they_were
"""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.support.sampling_rig import SECOND_EOS, Answer, Choice, SamplingRig, sampling_rig

pytestmark = pytest.mark.asyncio(loop_scope="module")
WAYS = [(split, stream) for split in (False, True) for stream in (False, True)]
PROMPT = "repeat: hello"
BASE: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0}
CHAT = "/v1/chat/completions"
SECOND_EOS_ALWAYS = {str(SECOND_EOS): 100}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig() -> AsyncIterator[SamplingRig]:
    async with sampling_rig() as started:
        yield started


async def ask_each_way(rig: SamplingRig, body: dict[str, Any], path: str = "/v1/completions") -> list[Answer]:
    """The answers of all four ways, which must say the same."""
    answers = [await rig.ask(body, split=split, stream=stream, path=path) for split, stream in WAYS]
    for answer, way in zip(answers, WAYS, strict=True):
        assert answer.status == 200, (way, answer.error)
        assert answer.error is None, way
        assert len(answer.choices) == len(answers[0].choices), way
        for ours, first in zip(answer.choices, answers[0].choices, strict=True):
            assert plain(ours) == plain(first), way
            assert ours.logprobs == pytest.approx(first.logprobs, abs=1e-4), way
    return answers


def plain(choice: Choice) -> tuple[object, ...]:
    return choice.text, choice.finish_reason, choice.stop_reason, choice.tokens


async def said(rig: SamplingRig, body: dict[str, Any]) -> Choice:
    """The one choice, the same on all four ways."""
    return (await ask_each_way(rig, body))[0].choice


def script(text: str) -> dict[str, Any]:
    return {"vllm_xargs": {"script": text}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *[({"stop_token_ids": [token]}, "stop_token_ids") for token in (999999, -1, 2**31)],
        ({"stop_token_ids": list(range(257))}, "stop_token_ids"),
        ({"logit_bias": {"999999": 5}}, "logit_bias"),
        ({"logit_bias": {"-1": 5}}, "logit_bias"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {str(token): 1 for token in range(100_000)}}, "logit_bias"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": [f"word {number}" for number in range(100_000)]}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [261]}, "allowed_token_ids"),
        ({"logprob_token_ids": [261]}, "logprob_token_ids"),
        ({"allowed_token_ids": [97], "bad_words": ["a"]}, "allowed_token_ids"),
        ({"seed": 2**63}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 3}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 10**6}, "logprobs"),
        ({"max_tokens": 8, "min_tokens": 9}, "min_tokens"),
        ({"vllm_xargs": {"script": {"nested": 1}}}, "vllm_xargs"),
    ],
)
async def test_a_field_that_cannot_be_served_is_refused_by_name_before_any_prefill(
    rig: SamplingRig, fields: dict[str, Any], param: str
):
    before = [engine.engine.status().prompt_tokens_computed for engine in (rig.p, rig.d)]
    for split, stream in WAYS:
        answer = await rig.ask({**BASE, **fields}, split=split, stream=stream)
        assert answer.status == 400, (split, stream)
        assert answer.error is not None
        assert re.split(r"[.\[]", answer.error["param"])[0] == param
    assert [engine.engine.status().prompt_tokens_computed for engine in (rig.p, rig.d)] == before
    assert rig.sink.held == {}


async def test_a_bias_beyond_the_range_is_clamped_as_the_field_does(rig: SamplingRig):
    choice = await said(rig, {**BASE, "max_tokens": 3, "logit_bias": {"97": 1e9}})
    assert choice.text == "aaa"


async def test_penalties_see_prompt_and_output_on_either_way(rig: SamplingRig):
    free = await said(rig, BASE)
    texts = {free.text}
    for fields in ({"frequency_penalty": -2}, {"frequency_penalty": 2}, {"presence_penalty": 2}):
        texts.add((await said(rig, {**BASE, **fields})).text)
    assert len(texts) > 2
    # A token of the prompt, pushed to the top by less than the penalty takes away again.
    liked = {**BASE, "max_tokens": 1, "logit_bias": {str(ord("l")): 100}}
    assert (await said(rig, liked)).text == "l"
    assert (await said(rig, {**liked, "repetition_penalty": 1000.0})).text != "l"


async def test_penalties_count_every_token_of_a_draft_that_came_true(rig: SamplingRig):
    """Text that repeats itself is what drafts guess best, and what penalties change most."""
    before = rig.d.engine.status().num_accepted_draft_tokens
    again = {**BASE, "prompt": "abcabcabcabc", "max_tokens": 40, **script("abcabcabcabcabcabcabcabcabcabc")}
    for fields in ({}, {"frequency_penalty": 2}, {"presence_penalty": -2}, {"repetition_penalty": 1.3}, {"seed": 4}):
        await said(rig, {**again, **fields})
    assert rig.d.engine.status().num_accepted_draft_tokens - before > 40
    hold = {**again, "min_tokens": 20, "logit_bias": SECOND_EOS_ALWAYS, "logprobs": 0}
    assert len((await said(rig, hold)).tokens) == 31, "tokens are counted, not steps"


@pytest.mark.parametrize("shift", range(3))
async def test_no_part_of_a_stop_string_leaks_wherever_it_is_cut(rig: SamplingRig, shift: int):
    letters = "ABCDEFGHIJKL"[shift:]
    body = {**BASE, "max_tokens": len(letters), **script(letters)}
    stopped = await said(rig, {**body, "stop": ["DEFGHIJ", "nothing"]})
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == (letters[: 3 - shift], "stop", "DEFGHIJ")
    shown = await said(rig, {**body, "stop": "DEFGHIJ", "include_stop_str_in_output": True})
    assert shown.text == letters[: 10 - shift]
    held = await said(rig, {**body, "stop": "KLM"})
    assert (held.text, held.finish_reason) == (letters, "length")
    half = await said(rig, {**body, "max_tokens": 4, "stop": ["\u00e9"], **script("a\u00e9b")})
    assert (half.text, half.finish_reason) == ("a", "stop")


async def test_a_seed_gives_the_same_text_alone_in_company_and_on_either_way(rig: SamplingRig):
    body = {**BASE, "temperature": 0.8, "seed": 42}
    alone = await said(rig, body)
    company = {**BASE, "temperature": 0.8}
    for split in (False, True):
        async with asyncio.TaskGroup() as group:
            others = [group.create_task(rig.ask(company, split=split)) for _ in range(7)]
            ours = group.create_task(rig.ask(body, split=split, stream=True))
        assert plain(ours.result().choice) == plain(alone)
        assert len({other.result().choice.text for other in others}) > 1
        assert (await rig.ask({**body, "seed": -1}, split=split)).status == 200
    assert (await said(rig, {**body, "seed": -(2**63)})).text != alone.text


async def test_masked_alternatives_are_reported_with_a_finite_number(rig: SamplingRig):
    choices = {"structured_outputs": {"choice": ["positive", "negative"]}}
    body = {**BASE, **choices, "logprobs": 5}
    choice = await said(rig, body)
    assert choice.text in ("positive", "negative")
    reported = [value for top in choice.top for value in top.values()]
    assert -9999.0 in reported
    assert all(-9999.0 <= value <= 0 for value in reported)
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 24, "temperature": 0, **choices}
    (first, *_) = await ask_each_way(rig, {**chat, "logprobs": True, "top_logprobs": 5}, CHAT)
    assert first.choice.text == choice.text
    assert {len(top) for top in first.choice.top} == {5}
    echoed = await said(rig, {**BASE, "temperature": 1, "top_k": 1, "echo": True, "logprobs": 1, "max_tokens": 3})
    assert echoed.text.startswith(PROMPT)


@pytest.mark.parametrize("budget", [0, 5])
async def test_a_thinking_budget_forces_one_end_and_never_inside_a_tool_call(rig: SamplingRig, budget: int):
    shown = {**BASE, "skip_special_tokens": False, "thinking_token_budget": budget}
    forced = await said(rig, {**shown, **script("<think>abcdefghijklmnopqrstuvwxyz")})
    assert forced.text.startswith("<think>" + "abcdefghijklmnopqrstuvwxyz"[:budget] + "</think>")
    assert forced.text.count("</think>") == 1
    again = await said(rig, {**shown, **script("<think>ab</think>cd<think>efghijklmn")})
    thought = sum(len(part.split("</think>")[0]) for part in again.text.split("<think>")[1:])
    assert thought <= budget
    assert "</think>" in again.text.rsplit("<think>", 1)[1]
    tool = '<think><t>{"q": "abcdef"}</t>'
    called = await said(rig, {**shown, "max_tokens": len(tool), "thinking_token_budget": 3, **script(tool)})
    assert called.text.startswith(tool + "</think>")
    cut = await said(rig, {**shown, "max_tokens": 2, **script("<think>abcdef")})
    assert cut.finish_reason == "length"


async def test_thinking_opened_by_the_prompt_counts_on_d(rig: SamplingRig):
    body = {**BASE, "prompt": "why?<think>abc", "skip_special_tokens": False, "thinking_token_budget": 5}
    choice = await said(rig, {**body, **script("defghij")})
    assert choice.text.startswith("de</think>")


async def test_min_tokens_holds_against_every_eos_id(rig: SamplingRig):
    eager = {**BASE, "logit_bias": SECOND_EOS_ALWAYS, "logprobs": 0}
    at_once = await said(rig, eager)
    assert (len(at_once.tokens), at_once.finish_reason) == (1, "stop")
    patient = await said(rig, {**eager, "min_tokens": 20})
    assert (len(patient.tokens), patient.finish_reason) == (21, "stop")


async def test_log_probabilities_of_the_prompt_come_from_p(rig: SamplingRig):
    for body in ({**BASE, "prompt_logprobs": 1}, {**BASE, "prompt_logprobs": 0, "n": 2, "temperature": 1, "seed": 3}):
        on_one, through_both = [await rig.ask(body, split=split) for split in (False, True)]
        ours, theirs = (answer.whole["choices"][0]["prompt_logprobs"] for answer in (through_both, on_one))
        assert len(ours) == len(PROMPT)
        assert ours[0] is None
        for entry, other in zip(ours[1:], theirs[1:], strict=True):
            assert entry.keys() == other.keys()
            for token, value in entry.items():
                assert value["logprob"] == pytest.approx(other[token]["logprob"], abs=1e-4)
    echoed = await said(rig, {**BASE, "echo": True, "logprobs": 1, "max_tokens": 4})
    assert (len(echoed.tokens), echoed.logprobs[0]) == (len(PROMPT) + 4, None)
    prompt_only = await said(rig, {**BASE, "echo": True, "logprobs": 1, "max_tokens": 0})
    assert (prompt_only.text, len(prompt_only.tokens)) == (PROMPT, len(PROMPT))


async def test_choices_differ_come_from_one_prefill_and_are_the_same_on_either_way(rig: SamplingRig):
    prompt = "three of one prompt, long enough for several blocks"
    body = {**BASE, "prompt": prompt, "n": 3, "temperature": 1, "seed": 1}
    before = rig.p.engine.status().num_handoffs, rig.d.engine.status().prompt_tokens_pulled
    through_both = await rig.ask(body, split=True, stream=True)
    after = rig.p.engine.status().num_handoffs, rig.d.engine.status().prompt_tokens_pulled
    assert (after[0] - before[0], after[1] - before[1]) == (1, len(prompt) - 1)
    assert len({choice.text for choice in through_both.choices}) == 3
    (first, *_) = await ask_each_way(rig, body)
    assert list(map(plain, first.choices)) == list(map(plain, through_both.choices))
    assert (await rig.ask({**body, "best_of": 3}, split=True)).status == 200


async def test_a_choice_that_stops_early_leaves_its_siblings_as_they_were(rig: SamplingRig):
    body = {**BASE, "n": 2, "temperature": 1.0, "seed": 5, "max_tokens": 100, "ignore_eos": True}
    first, second = (await rig.ask(body, split=False)).choices
    stop = next(letter for letter in first.text[1:] if letter.isascii() and letter not in second.text)
    for split, stream in WAYS:
        stopped, whole = (await rig.ask({**body, "stop": stop}, split=split, stream=stream)).choices
        assert (stopped.text, stopped.stop_reason) == (first.text.split(stop)[0], stop)
        assert whole.text == second.text.split(stop)[0]

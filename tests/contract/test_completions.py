"""Bodies of `/v1/completions`, to the byte where a client could tell."""

from collections.abc import AsyncIterator

import pytest

from tests.support.serving_rig import Rig, serving_rig

PATH = "/v1/completions"
BASE = {"model": "m", "prompt": "hi", "max_tokens": 16}


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with serving_rig() as running:
        yield running


async def test_a_whole_answer_has_openai_s_shape(rig: Rig):
    answer = await rig.post(PATH, BASE)
    assert answer.status == 200
    body = answer.json
    assert body.pop("id").startswith("cmpl-")
    assert body == {
        "object": "text_completion",
        "created": 1700000001,
        "model": "m",
        "choices": [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
        "usage": {
            "prompt_tokens": 2,
            "total_tokens": 8,
            "completion_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
        "system_fingerprint": None,
        "kv_transfer_params": None,
    } | {"created": body["created"]}


async def test_a_stream_says_the_same_text_and_ends_with_done(rig: Rig):
    answer = await rig.post(PATH, {**BASE, "stream": True})
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    *chunks, done = answer.events
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["stop"]
    assert all(chunk["object"] == "text_completion" and "usage" not in chunk for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_usage_comes_last_and_is_null_before(rig: Rig):
    body = {**BASE, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, done = (await rig.post(PATH, body)).events
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 6
    assert all(chunk["usage"] is None for chunk in chunks)


async def test_continuous_usage_counts_up(rig: Rig):
    body = {**BASE, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, _, _ = (await rig.post(PATH, body)).events
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 5, 6]


async def test_max_tokens_cuts_with_length(rig: Rig):
    choice = (await rig.post(PATH, {**BASE, "max_tokens": 3})).json["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("Hel", "length")


async def test_a_stop_string_ends_the_text_names_itself_and_aborts_the_rest(rig: Rig):
    for stream in (False, True):
        answer = await rig.post(PATH, {**BASE, "stop": ["ll"], "stream": stream})
        choices = [e["choices"][0] for e in answer.events if e != "[DONE]"] if stream else answer.json["choices"]
        assert "".join(choice["text"] for choice in choices) == "He"
        assert choices[-1]["finish_reason"] == "stop"
        assert choices[-1]["stop_reason"] == "ll"
    assert len(rig.engine.left) == 2


async def test_a_choice_that_hits_a_stop_string_is_ended_alone_and_the_others_go_on(rig: Rig):
    rig.engine.text = ["one, two", "three"]
    choices = (await rig.post(PATH, {**BASE, "n": 2, "temperature": 1, "stop": [","]})).json["choices"]
    assert [(choice["text"], choice["stop_reason"]) for choice in choices] == [("one", ","), ("three", None)]
    assert rig.engine.ended_choices == [0]
    assert rig.engine.left == []


async def test_lists_of_prompts_become_choices_in_order(rig: Rig):
    rig.engine.text = ["one", "two", "three"]
    for prompt, num in [(["a", "b", "c"], 3), ([[1, 2], [3]], 2), ([5, 6], 1)]:
        rig.engine.requests.clear()
        choices = (await rig.post(PATH, {**BASE, "prompt": prompt})).json["choices"]
        assert [choice["index"] for choice in choices] == list(range(num))
        assert [choice["text"] for choice in choices] == ["one", "two", "three"][:num]


async def test_n_choices_of_several_prompts_are_numbered_prompt_by_prompt(rig: Rig):
    body = {**BASE, "prompt": ["a", "b"], "n": 2, "stream": True}
    *chunks, _ = (await rig.post(PATH, body)).events
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == dict.fromkeys(range(4), "Hello")


async def test_echo_puts_the_prompt_before_each_choice(rig: Rig):
    for stream in (False, True):
        answer = await rig.post(PATH, {**BASE, "echo": True, "stream": stream})
        choices = [e["choices"][0] for e in answer.events if e != "[DONE]"] if stream else answer.json["choices"]
        assert "".join(choice["text"] for choice in choices) == "hiHello"


async def test_echo_with_logprobs_covers_the_prompt(rig: Rig):
    answer = await rig.post(PATH, {**BASE, "echo": True, "logprobs": 1, "max_tokens": 2})
    logprobs = answer.json["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["h", "i", "H", "e"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert logprobs["top_logprobs"] == [None, {"i": -0.5}, {"H": -0.5}, {"e": -0.5}]


async def test_echo_without_output_shows_the_prompt_alone(rig: Rig):
    answer = await rig.post(PATH, {**BASE, "echo": True, "logprobs": 1, "max_tokens": 0})
    assert answer.status == 200
    choice = answer.json["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hi", "length")
    assert choice["logprobs"]["tokens"] == ["h", "i"]
    assert answer.json["usage"]["completion_tokens"] == 0


async def test_impossible_alternatives_have_a_finite_floor(rig: Rig):
    logprobs = (await rig.post(PATH, {**BASE, "logprobs": 3, "max_tokens": 1})).json["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"H": -0.5, "a": -9999.0, "b": -9999.0}]


async def test_streamed_logprobs_keep_counting_offsets(rig: Rig):
    *chunks, _ = (await rig.post(PATH, {**BASE, "logprobs": 0, "max_tokens": 3, "stream": True})).events
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks] == [[0], [1], [2]]


async def test_prompt_logprobs_are_vllm_s(rig: Rig):
    choice = (await rig.post(PATH, {**BASE, "prompt_logprobs": 1, "max_tokens": 1})).json["choices"][0]
    assert choice["prompt_logprobs"] == [None, {"105": {"logprob": -0.5, "rank": 1, "decoded_token": "i"}}]


async def test_token_ids_come_on_request(rig: Rig):
    choice = (await rig.post(PATH, {**BASE, "return_token_ids": True, "max_tokens": 2})).json["choices"][0]
    assert choice["token_ids"] == list(b"He")
    assert choice["prompt_token_ids"] == list(b"hi")
    logprobs = {"logprobs": 0, "return_tokens_as_token_ids": True, "max_tokens": 1}
    assert (await rig.post(PATH, {**BASE, **logprobs})).json["choices"][0]["logprobs"]["tokens"] == ["token_id:72"]


async def test_the_default_output_is_sixteen_tokens_long(rig: Rig):
    await rig.post(PATH, {"prompt": "hi"})
    assert rig.engine.requests[0].sampling.max_tokens == 16


async def test_a_character_of_several_tokens_is_never_split(rig: Rig):
    rig.engine.text = "aé"
    *chunks, _ = (await rig.post(PATH, {**BASE, "stream": True})).events
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert texts == ["a", "é", ""]

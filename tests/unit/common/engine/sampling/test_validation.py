import re

import pytest
from structlog.testing import capture_logs

from common.engine.sampling.params import RepetitionDetection, SamplingParams
from common.engine.sampling.processors.processor import LogitsProcessor
from common.engine.sampling.raw import RawSampling, SamplingContext, SamplingLimits
from common.engine.sampling.validation import normalise
from common.errors import ContextLengthExceeded, InvalidRequest
from tests.support.byte_tokenizer import ByteTokenizer

VOCAB_SIZE = 261


def context(**changes) -> SamplingContext:
    values = {"tokenizer": ByteTokenizer(), "vocab_size": VOCAB_SIZE, "max_model_len_tokens": 100} | changes
    return SamplingContext(**values)


def params(raw: dict | None = None, *, num_prompt_tokens: int = 10, **changes) -> SamplingParams:
    return normalise(RawSampling(**(raw or {})), context(**changes), num_prompt_tokens)


def test_an_empty_request_gets_the_defaults_and_all_the_room_there_is():
    assert params() == SamplingParams(max_tokens=90)


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": 129}, "n"),
        ({"n": 2, "temperature": 0.0}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"detokenize": False}, "detokenize"),
        ({"temperature": -5.0}, "temperature"),
        ({"temperature": 2.01}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": -0.1, "temperature": 0.0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"seed": 1 << 63}, "seed"),
        ({"seed": -(1 << 63) - 1}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ("a", "")}, "stop"),
        ({"stop": tuple(map(str, range(65)))}, "stop"),
        ({"stop": "x" * 8193}, "stop"),
        ({"stop_token_ids": (999999,)}, "stop_token_ids"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"stop_token_ids": (2**31,)}, "stop_token_ids"),
        ({"stop_token_ids": (VOCAB_SIZE,)}, "stop_token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 91}, "max_tokens"),
        ({"max_completion_tokens": 91}, "max_completion_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"min_completion_tokens": 6, "max_completion_tokens": 5}, "min_completion_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": -2}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"logprob_token_ids": ()}, "logprob_token_ids"),
        ({"logprob_token_ids": (VOCAB_SIZE,)}, "logprob_token_ids"),
        ({"logprob_token_ids": tuple(range(129))}, "logprob_token_ids"),
        ({"logit_bias": {"999999": 5.0}}, "logit_bias"),
        ({"logit_bias": {"-1": 5.0}}, "logit_bias"),
        ({"logit_bias": {"abc": 1.0}}, "logit_bias"),
        ({"logit_bias": {"5": float("nan")}}, "logit_bias"),
        ({"logit_bias": {str(token): 1.0 for token in range(100_000)}}, "logit_bias"),
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"allowed_token_ids": (VOCAB_SIZE,)}, "allowed_token_ids"),
        ({"allowed_token_ids": tuple(range(100_000))}, "allowed_token_ids"),
        ({"allowed_token_ids": (97,), "bad_words": ("a", " a")}, "allowed_token_ids"),
        ({"allowed_token_ids": (256,), "min_tokens": 1}, "min_tokens"),
        ({"allowed_token_ids": (97, 256), "stop_token_ids": (97,), "min_tokens": 1}, "min_tokens"),
        ({"bad_words": ("",)}, "bad_words"),
        ({"bad_words": (" ",)}, "bad_words"),
        ({"bad_words": tuple(map(str, range(100_000)))}, "bad_words"),
        ({"bad_words": tuple(map(str, range(100, 170)))}, "bad_words"),
        ({"bad_words": ("x" * 600,)}, "bad_words"),
        ({"bad_words": ("x" * 10_000_000,)}, "bad_words"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"repetition_detection": {"max_pattern_size": 4, "min_count": 1}}, "repetition_detection.min_count"),
        ({"repetition_detection": {"max_pattern_size": -1}}, "repetition_detection.max_pattern_size"),
        (
            {"repetition_detection": {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}},
            "repetition_detection.min_pattern_size",
        ),
        ({"repetition_detection": {"pattern": 3}}, "repetition_detection"),
        ({"repetition_detection": {"max_pattern_size": 5000, "min_count": 2}}, "repetition_detection"),
    ],
)
def test_a_bad_field_is_refused_by_its_name(raw, field):
    with pytest.raises(InvalidRequest) as refused:
        params(raw)
    assert refused.value.param == field
    assert re.search(field.split(".")[-1], refused.value.message)
    assert len(refused.value.message) < 300


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"temperature": 0.0, "top_p": 0.5, "top_k": 9, "min_p": 0.1}, {"temperature": 0.0}),
        ({"temperature": 1e-6, "top_p": 0.5}, {"temperature": 0.0}),
        ({"temperature": 2.0}, {"temperature": 2.0}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 10**9}, {"top_k": 10**9}),
        ({"seed": -1}, {"seed": None}),
        ({"seed": 0}, {"seed": 0}),
        ({"seed": (1 << 63) - 1}, {"seed": (1 << 63) - 1}),
        ({"seed": -(1 << 63)}, {"seed": -(1 << 63)}),
        ({"stop": "END"}, {"stop": ("END",)}),
        ({"stop": ()}, {"stop": ()}),
        ({"stop": ("a", "b", "a")}, {"stop": ("a", "b")}),
        ({"stop_token_ids": (5, 7, 5)}, {"stop_token_ids": (5, 7)}),
        ({"max_tokens": 50, "max_completion_tokens": 20}, {"max_tokens": 20}),
        ({"max_tokens": 90}, {"max_tokens": 90}),
        ({"min_tokens": 5, "max_tokens": 5}, {"min_tokens": 5, "max_tokens": 5}),
        ({"logprobs": True}, {"logprobs": 1}),
        ({"logprobs": False}, {"logprobs": None}),
        ({"logprobs": 0}, {"logprobs": 0}),
        ({"prompt_logprobs": True}, {"prompt_logprobs": 1}),
        ({"logprob_token_ids": (3, 4)}, {"logprob_token_ids": (3, 4)}),
        (
            {"logit_bias": {"5": 1e9, "6": -1e9, "7": float("inf")}},
            {"logit_bias": ((5, 100.0), (6, -100.0), (7, 100.0))},
        ),
        ({"logit_bias": {}}, {"logit_bias": ()}),
        ({"allowed_token_ids": (1, 2, 1)}, {"allowed_token_ids": (1, 2)}),
        ({"thinking_token_budget": -1}, {"thinking_token_budget": None}),
        ({"repetition_detection": {"max_pattern_size": 0}}, {"repetition_detection": None}),
        (
            {"repetition_detection": {"max_pattern_size": 8, "min_count": 3}},
            {"repetition_detection": RepetitionDetection(max_pattern_size=8, min_pattern_size=1, min_count=3)},
        ),
        ({"n": 3, "best_of": 3}, {"n": 3}),
        ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
        ({"vllm_xargs": {"k": 1}}, {"extra_args": {"k": 1}}),
    ],
)
def test_a_good_field_is_normalised(raw, expected):
    assert params(raw) == SamplingParams(**({"max_tokens": 90} | expected))


@pytest.mark.parametrize("temperature", [1e-5, 0.0099])
def test_a_tiny_temperature_is_raised_with_a_warning(temperature):
    with capture_logs() as logs:
        assert params({"temperature": temperature}).temperature == 0.01
    assert [entry["log_level"] for entry in logs] == ["warning"]


def test_bad_words_are_tokenised_in_both_spacings():
    result = params({"bad_words": ("ab", " ab", "c")})
    assert result.bad_words_token_ids == ((97, 98), (32, 97, 98), (99,), (32, 99))


def test_a_prompt_that_fills_the_context_is_refused():
    with pytest.raises(ContextLengthExceeded) as refused:
        params(num_prompt_tokens=100)
    assert refused.value.param == "prompt"
    assert "100" in refused.value.message


def test_output_that_does_not_fit_after_the_prompt_is_refused_with_the_room_there_is():
    with pytest.raises(ContextLengthExceeded, match="has room for 90"):
        params({"max_tokens": 91})


def test_recommended_values_of_the_model_fill_what_the_request_left_open():
    recommended = RawSampling(temperature=0.6, top_p=0.9, max_tokens=1000)
    result = params({"top_p": 0.5}, defaults=recommended)
    assert (result.temperature, result.top_p, result.max_tokens) == (0.6, 0.5, 90)


def test_the_whole_vocabulary_of_logprobs_needs_a_limit_that_allows_it():
    assert params({"logprobs": -1}, limits=SamplingLimits(max_logprobs=-1)).logprobs == -1
    assert params({"logprobs": -1}, limits=SamplingLimits(max_logprobs=VOCAB_SIZE)).logprobs == -1


def test_a_thinking_budget_is_accepted_where_the_model_thinks():
    assert params({"thinking_token_budget": 0}, has_thinking=True).thinking_token_budget == 0


class RefusesTopK(LogitsProcessor):
    @classmethod
    def validate_params(cls, params):
        if params.top_k:
            raise InvalidRequest("top_k does not go with this processor", "top_k")


def test_a_custom_processor_may_refuse_a_request():
    assert params(processors=(RefusesTopK,)).top_k == 0
    with pytest.raises(InvalidRequest, match="does not go"):
        params({"top_k": 5}, processors=(RefusesTopK,))

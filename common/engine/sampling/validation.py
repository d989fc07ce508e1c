"""From a request's sampling fields to `SamplingParams`, or to a 400 that names the field.

Journey row 1 inside an engine: the same on P and D. Owns: defaults, normalisation and contradictions between fields.
Ranges of single fields: `common.engine.sampling.checks`. Source: vLLM 0.32 `SamplingParams`; what differs says so.
"""

import math
from dataclasses import replace
from typing import TypeVar

import structlog

from common.engine.sampling import checks
from common.engine.sampling.params import SamplingParams
from common.engine.sampling.raw import RawSampling, SamplingContext
from common.errors import ContextLengthExceeded, InvalidRequest

_GREEDY_BELOW = 1e-5
_LOWEST_TEMPERATURE = 0.01
_HIGHEST_TEMPERATURE = 2.0
_LOG = structlog.get_logger(__name__)
ValueT = TypeVar("ValueT")


def normalise(raw: RawSampling, context: SamplingContext, num_prompt_tokens: int) -> SamplingParams:
    """Check and complete a request's sampling fields.

    Args:
        raw: as written.
        context: what they are checked against.
        num_prompt_tokens: length of the prompt they will continue.

    Raises:
        InvalidRequest: a field out of range, unknown to the vocabulary, too long, or in contradiction to another.
        ContextLengthExceeded: prompt and asked-for output do not fit.
    """
    _refuse_what_is_not_offered(raw)
    given = raw.filled_from(context.defaults)
    max_tokens = _max_tokens(raw, given, context, num_prompt_tokens)
    params = _distribution(given, context)
    params = _ending(params, given, context, max_tokens)
    params = _reporting(params, given, context)
    params = _vocabulary(params, given, context)
    _refuse_contradictions(params, context)
    for processor in context.processors:
        processor.validate_params(params)
    return params


def _or(value: ValueT | None, default: ValueT) -> ValueT:
    return default if value is None else value


def _refuse_what_is_not_offered(raw: RawSampling) -> None:
    if raw.use_beam_search:
        raise InvalidRequest("use_beam_search is not offered; use n with temperature > 0", "use_beam_search")
    if raw.best_of is not None and raw.best_of != _or(raw.n, 1):
        raise InvalidRequest("best_of is not offered beside n: every choice that is computed is returned", "best_of")
    if raw.detokenize is False:
        raise InvalidRequest("detokenize=false is not offered; return_token_ids adds the ids to the text", "detokenize")


def _distribution(given: RawSampling, context: SamplingContext) -> SamplingParams:
    """What shapes the distribution. Cuts are checked also where greedy sampling has no use for them."""
    params = SamplingParams(
        n=checks.count("n", _or(given.n, 1), 1, context.limits.max_n),
        temperature=_temperature(given.temperature),
        top_p=checks.number("top_p", _or(given.top_p, 1.0), 0, 1, open_low=True),
        top_k=checks.top_k(_or(given.top_k, 0)),
        min_p=checks.number("min_p", _or(given.min_p, 0.0), 0, 1),
        seed=checks.seed(given.seed),
        presence_penalty=checks.number("presence_penalty", _or(given.presence_penalty, 0.0), -2, 2),
        frequency_penalty=checks.number("frequency_penalty", _or(given.frequency_penalty, 0.0), -2, 2),
        repetition_penalty=checks.number(
            "repetition_penalty", _or(given.repetition_penalty, 1.0), 0, math.inf, open_low=True
        ),
        extra_args=dict(given.vllm_xargs or {}),
    )
    if not params.is_greedy:
        return params
    if params.n > 1:
        raise InvalidRequest("n must be 1 when temperature is 0: greedy choices would all be the same", "n")
    return replace(params, top_p=1.0, top_k=0, min_p=0.0)


def _temperature(value: float | None) -> float:
    """Below 1e-5 greedy; then raised to 0.01, under which probabilities leave the range of single precision."""
    temperature = checks.number("temperature", _or(value, 1.0), 0, _HIGHEST_TEMPERATURE)
    if temperature < _GREEDY_BELOW:
        return 0.0
    if temperature < _LOWEST_TEMPERATURE:
        _LOG.warning("sampling.temperature_raised", temperature=temperature, raised_to=_LOWEST_TEMPERATURE)
        return _LOWEST_TEMPERATURE
    return temperature


def _max_tokens(raw: RawSampling, given: RawSampling, context: SamplingContext, num_prompt_tokens: int) -> int:
    """The asked-for output, `max_completion_tokens` first; what the context leaves where nothing is asked."""
    room = context.max_model_len_tokens - num_prompt_tokens
    if room < 1:
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt_tokens} tokens; this model takes {context.max_model_len_tokens} tokens, "
            "prompt and output together",
            "prompt",
        )
    field = "max_tokens" if raw.max_completion_tokens is None else "max_completion_tokens"
    asked = _or(raw.max_completion_tokens, raw.max_tokens)
    if asked is None:  # the model's recommendation is no promise: it gives way to the context
        return min(room, max(1, _or(given.max_tokens, room)))
    if checks.count(field, asked, 1) > room:
        raise ContextLengthExceeded(
            f"{field} is {asked}, but after {num_prompt_tokens} prompt tokens the context of "
            f"{context.max_model_len_tokens} tokens has room for {room}",
            field,
        )
    return asked


def _ending(params: SamplingParams, given: RawSampling, context: SamplingContext, max_tokens: int) -> SamplingParams:
    """When the output ends."""
    limits = context.limits
    field = "min_tokens" if given.min_completion_tokens is None else "min_completion_tokens"
    min_tokens = checks.count(field, _or(_or(given.min_completion_tokens, given.min_tokens), 0), 0)
    if min_tokens > max_tokens:
        raise InvalidRequest(f"{field} is {min_tokens}, more than max_tokens = {max_tokens}", field)
    return replace(
        params,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=checks.stop_strings(given.stop, limits.max_stop_strings, limits.max_stop_chars),
        stop_token_ids=checks.token_ids(
            "stop_token_ids", given.stop_token_ids or (), limits.max_stop_token_ids, context.vocab_size
        ),
        include_stop_str_in_output=_or(given.include_stop_str_in_output, False),
        ignore_eos=_or(given.ignore_eos, False),
        thinking_token_budget=_thinking_budget(given.thinking_token_budget, has_thinking=context.has_thinking),
        repetition_detection=checks.repetition_detection(given.repetition_detection, limits.max_pattern_tokens),
    )


def _thinking_budget(value: int | None, *, has_thinking: bool) -> int | None:
    """-1 is unlimited. Refused where it could not be enforced."""
    field = "thinking_token_budget"
    if value is None or checks.count(field, value, -1) == -1:
        return None
    if not has_thinking:
        raise InvalidRequest(f"{field}: this model has no thinking section (no reasoning parser is configured)", field)
    return value


def _reporting(params: SamplingParams, given: RawSampling, context: SamplingContext) -> SamplingParams:
    """What is told about the tokens, and how they become text."""
    limits, vocab_size = context.limits, context.vocab_size
    return replace(
        params,
        logprobs=checks.num_logprobs("logprobs", given.logprobs, limits.max_logprobs, vocab_size),
        prompt_logprobs=checks.num_logprobs("prompt_logprobs", given.prompt_logprobs, limits.max_logprobs, vocab_size),
        logprob_token_ids=_listed(
            "logprob_token_ids", given.logprob_token_ids, limits.max_logprob_token_ids, vocab_size
        ),
        skip_special_tokens=_or(given.skip_special_tokens, True),
        spaces_between_special_tokens=_or(given.spaces_between_special_tokens, True),
    )


def _vocabulary(params: SamplingParams, given: RawSampling, context: SamplingContext) -> SamplingParams:
    """Which tokens are wanted, unwanted or forbidden."""
    limits = context.limits
    bad_words = tuple(dict.fromkeys(given.bad_words or ()))
    return replace(
        params,
        logit_bias=checks.logit_bias(given.logit_bias, limits.max_logit_bias, context.vocab_size),
        allowed_token_ids=_listed("allowed_token_ids", given.allowed_token_ids, context.vocab_size, context.vocab_size),
        bad_words=bad_words,
        bad_words_token_ids=checks.bad_word_token_ids(
            bad_words, context.tokenizer, limits.max_bad_words, limits.max_bad_word_tokens
        ),
    )


def _listed(field: str, value: tuple[int, ...] | None, limit: int, vocab_size: int) -> tuple[int, ...] | None:
    if value is None:
        return None
    checks.non_empty(field, value)
    return checks.token_ids(field, value, limit, vocab_size)


def _refuse_contradictions(params: SamplingParams, context: SamplingContext) -> None:
    """No token may be left from the start: that is a mistake to tell, not an output to fail."""
    if params.allowed_token_ids is None:
        return
    never = {word[0] for word in params.bad_words_token_ids if len(word) == 1}
    usable = set(params.allowed_token_ids) - never
    if not usable:
        raise InvalidRequest("bad_words forbid every token of allowed_token_ids", "allowed_token_ids")
    if params.min_tokens and usable <= context.tokenizer.eos_token_ids | set(params.stop_token_ids):
        raise InvalidRequest("min_tokens forbids every token of allowed_token_ids: all of them stop", "min_tokens")

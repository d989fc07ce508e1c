"""Checks of single sampling fields: each returns the normalised value or refuses the field by name.

Owns: ranges and their wording. Does not know how fields depend on each other: `common.engine.sampling.validation`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from common.engine.sampling.params import RepetitionDetection
from common.engine.tokenizer import Tokenizer
from common.errors import InvalidRequest

_SEED_LIMIT = 1 << 63
_BIAS_LIMIT = 100.0


def number(field: str, value: float, low: float, high: float, *, open_low: bool = False) -> float:
    """A finite number in `[low, high]`, or `(low, high]`."""
    inside = (low < value if open_low else low <= value) and value <= high
    if not (math.isfinite(value) and inside):
        bracket = "(" if open_low else "["
        upper = f"{high:g}]" if math.isfinite(high) else "inf)"
        raise InvalidRequest(f"{field} must be a finite number in {bracket}{low:g}, {upper}, got {value}", field)
    return float(value)


def count(field: str, value: int, low: int, high: int | None = None) -> int:
    """An integer of at least `low`, at most `high`."""
    if isinstance(value, bool) or value < low or (high is not None and value > high):
        upper = "" if high is None else f" and at most {high}"
        raise InvalidRequest(f"{field} must be an integer of at least {low}{upper}, got {value}", field)
    return value


def seed(value: int | None) -> int | None:
    """64 bits with a sign; -1 means none, as in vLLM."""
    if value is None or value == -1:
        return None
    if isinstance(value, bool) or not -_SEED_LIMIT <= value < _SEED_LIMIT:
        raise InvalidRequest(f"seed must be an integer in [-2^63, 2^63), got {value}", "seed")
    return value


def top_k(value: int) -> int:
    """0 and -1 are off."""
    return 0 if count("top_k", value, -1) == -1 else value


def num_logprobs(field: str, value: int | bool | None, limit: int, vocab_size: int) -> int | None:
    """True is 1, False is None, -1 the whole vocabulary where the limit allows that much."""
    if value is None or value is False:
        return None
    wanted = int(value)
    if wanted < -1:
        raise InvalidRequest(f"{field} must be 0 or more, or -1 for the whole vocabulary, got {wanted}", field)
    asked = vocab_size if wanted == -1 else wanted
    if limit != -1 and asked > limit:
        raise InvalidRequest(f"{field} asks for {asked} alternatives; this engine reports at most {limit}", field)
    return wanted


def stop_strings(value: str | Sequence[str] | None, max_strings: int, max_chars: int) -> tuple[str, ...]:
    """A string is a list of one; empty strings would stop everything."""
    stops = (value,) if isinstance(value, str) else tuple(dict.fromkeys(value or ()))
    if any(not stop for stop in stops):
        raise InvalidRequest("stop must not contain an empty string", "stop")
    _at_most("stop", len(stops), max_strings, "strings")
    _at_most("stop", sum(map(len, stops)), max_chars, "characters")
    return stops


def token_ids(field: str, value: Iterable[int], limit: int, vocab_size: int) -> tuple[int, ...]:
    """Ids of the vocabulary, each once, in the order given."""
    ids = tuple(dict.fromkeys(value))
    _at_most(field, len(ids), limit, "token ids")
    for token_id in ids:
        if isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"{field}: token ids must be in [0, {vocab_size}), got {token_id}", field)
    return ids


def non_empty(field: str, value: Sequence[int]) -> None:
    """A list whose emptiness would mean something nobody wants."""
    if not value:
        raise InvalidRequest(f"{field} must not be empty; leave it out to switch it off", field)


def logit_bias(value: Mapping[str, float] | None, limit: int, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Keys from strings, values clamped to ±100."""
    field = "logit_bias"
    _at_most(field, len(value or ()), limit, "entries")
    biases: dict[int, float] = {}
    for key, bias in (value or {}).items():
        try:
            token_id = int(key)
        except ValueError:
            raise InvalidRequest(f"{field}: keys must be token ids, got {key!r}", field) from None
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"{field}: token ids must be in [0, {vocab_size}), got {token_id}", field)
        if math.isnan(bias):
            raise InvalidRequest(f"{field}: the bias of token {token_id} is not a number", field)
        biases[token_id] = min(max(float(bias), -_BIAS_LIMIT), _BIAS_LIMIT)
    return tuple(biases.items())


def bad_word_token_ids(
    words: Sequence[str], tokenizer: Tokenizer, max_sequences: int, max_tokens: int
) -> tuple[tuple[int, ...], ...]:
    """Each word as tokens, as it is spelled after a break and after a space (where that is a spelling of its own)."""
    field = "bad_words"
    _at_most(field, len(words), max_sequences, "words")
    # A token is at least one character or part of one, so this much text is refused before it is tokenised.
    _at_most(field, sum(map(len, words)), 16 * max_tokens, "characters")
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        if not bare:
            raise InvalidRequest("bad_words must not contain an empty or blank string", field)
        for spelling in (bare, f" {bare}"):
            ids = tuple(tokenizer.encode(spelling, add_special_tokens=False))
            if not ids:
                raise InvalidRequest(f"bad_words: {word!r} has no tokens in this vocabulary", field)
            sequences[ids] = None
    _at_most(field, len(sequences), max_sequences, "token sequences after tokenising")
    _at_most(field, sum(map(len, sequences)), max_tokens, "tokens after tokenising")
    return tuple(sequences)


def repetition_detection(value: Mapping[str, int] | None, max_tokens: int) -> RepetitionDetection | None:
    """A pattern size of 0 switches it off, as in vLLM."""
    field = "repetition_detection"
    if not value:
        return None
    unknown = set(value) - {"max_pattern_size", "min_pattern_size", "min_count"}
    if unknown:
        raise InvalidRequest(f"{field}: unknown key {sorted(unknown)[0]!r}", field)
    longest = count(f"{field}.max_pattern_size", value.get("max_pattern_size", 0), 0)
    shortest = count(f"{field}.min_pattern_size", value.get("min_pattern_size", 0), 0, longest)
    if longest == 0:
        return None
    times = count(f"{field}.min_count", value.get("min_count", 0), 2)
    _at_most(field, longest * times, max_tokens, "tokens (max_pattern_size * min_count)")
    return RepetitionDetection(max_pattern_size=longest, min_pattern_size=max(shortest, 1), min_count=times)


def _at_most(field: str, number_given: int, limit: int, what: str) -> None:
    if number_given > limit:
        raise InvalidRequest(f"{field}: at most {limit} {what}, got {number_given}", field)

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.outputs import PositionLogprobs, TokenDelta, TokenLogprob
from common.engine.request_state import FinishReason
from common.engine.sampling.params import SamplingParams
from common.engine.text_output import TextOutput
from common.errors import Bug
from common.ids import RequestId
from tests.support.byte_tokenizer import EOS_TOKEN_ID, ByteTokenizer

R = RequestId("r")


def delta(token_ids, finish=None, stop_reason=None, logprobs=()) -> TokenDelta:
    return TokenDelta(
        request_id=R, token_ids=tuple(token_ids), finish=finish, stop_reason=stop_reason, logprobs=tuple(logprobs)
    )


def run(token_ids, sizes, finish=FinishReason.LENGTH, stop_reason=None, **sampling):
    """(text, finish, stop_reason, number of tokens) of an output delivered in deltas of these sizes."""
    output = TextOutput(ByteTokenizer(), SamplingParams(**sampling))
    rest, text, count = list(token_ids), "", 0
    for size in [*sizes, len(rest)]:
        piece, rest = rest[:size], rest[size:]
        last = not rest
        result = output.push(delta(piece, finish if last else None, stop_reason if last else None))
        text += result.text
        count += len(result.token_ids)
        if result.finish is not None:
            return text, result.finish, result.stop_reason, count
    raise AssertionError("never finished")


@settings(max_examples=100, deadline=None)
@given(
    token_ids=st.lists(st.one_of(st.integers(97, 100), st.integers(0, 260)), min_size=1, max_size=30),
    sizes=st.lists(st.integers(1, 4), max_size=30),
    stop=st.lists(st.text("abcd", min_size=1, max_size=3), max_size=3),
    include=st.booleans(),
    skip=st.booleans(),
    min_tokens=st.integers(0, 10),
)
def test_streamed_text_is_the_whole_text_whatever_the_deltas(token_ids, sizes, stop, include, skip, min_tokens):
    sampling = {
        "stop": tuple(stop),
        "include_stop_str_in_output": include,
        "skip_special_tokens": skip,
        "min_tokens": min_tokens,
    }
    assert run(token_ids, sizes, **sampling) == run(token_ids, [], **sampling)


def test_no_part_of_a_stop_string_of_several_tokens_leaks():
    output = TextOutput(ByteTokenizer(), SamplingParams(stop=("DEFGHIJ",)))
    shown = [output.push(delta([byte])) for byte in b"ABCDEFGHIJ"]
    assert [each.text for each in shown] == ["A", "B", "C", *[""] * 7]
    assert shown[-1].finish is FinishReason.STOP
    assert shown[-1].stop_reason == "DEFGHIJ"


def test_a_stop_string_inside_a_token_cuts_the_token():
    assert run(b"one two", [], stop=("e t",)) == ("on", FinishReason.STOP, "e t", 5)


def test_an_included_stop_string_is_shown():
    assert run(b"one two", [], stop=("e t",), include_stop_str_in_output=True)[0] == "one t"


def test_held_text_is_flushed_at_the_end():
    assert run(b"ABCDEF", [1] * 6, stop=("DEFGHIJ",)) == ("ABCDEF", FinishReason.LENGTH, None, 6)


def test_a_stop_string_completed_by_the_last_token_wins_over_the_length():
    assert run(b"xEND", [2], finish=FinishReason.LENGTH, stop=("END",)) == ("x", FinishReason.STOP, "END", 4)


def test_a_stop_string_before_eos_in_one_delta_wins():
    assert run([*b"xEND", EOS_TOKEN_ID], [], finish=FinishReason.STOP, stop=("END",))[1:3] == (
        FinishReason.STOP,
        "END",
    )


def test_eos_is_no_text_and_has_no_stop_reason():
    assert run([*b"hi", EOS_TOKEN_ID], [1, 1], finish=FinishReason.STOP) == ("hi", FinishReason.STOP, None, 3)


@pytest.mark.parametrize(("include", "text"), [(False, "hi"), (True, "hi!")])
def test_a_stop_token_is_text_only_when_stops_are_included(include, text):
    ended = run(
        b"hi!",
        [],
        finish=FinishReason.STOP,
        stop_reason=33,
        stop_token_ids=(33,),
        include_stop_str_in_output=include,
    )
    assert ended == (text, FinishReason.STOP, 33, 3)


def test_text_of_the_first_min_tokens_cannot_stop():
    assert run(b"aENDbEND", [], stop=("END",), min_tokens=5)[0] == "aENDb"


def test_a_prefill_engine_ignores_stop_strings():
    assert run(b"END", [], finish=FinishReason.HANDED_OFF, stop=("END",), ignore_stops=True)[:2] == (
        "END",
        FinishReason.HANDED_OFF,
    )


def test_an_unfinished_character_is_shown_when_the_output_ends():
    assert run("aé".encode()[:2], [1])[0] == "a\ufffd"


def test_tokens_and_logprobs_beyond_the_stop_string_are_left_out():
    logprobs = [PositionLogprobs(chosen=TokenLogprob(token_id=token, logprob=-1.0, rank=1)) for token in b"aXb"]
    output = TextOutput(ByteTokenizer(), SamplingParams(stop=("X",), logprobs=0))
    result = output.push(delta(b"aXb", logprobs=logprobs))
    assert (result.text, result.token_ids, len(result.logprobs)) == ("a", (97, 88), 2)


def test_a_delta_after_the_end_is_a_bug():
    output = TextOutput(ByteTokenizer(), SamplingParams())
    output.push(delta(b"a", FinishReason.LENGTH))
    with pytest.raises(Bug):
        output.push(delta(b"b"))

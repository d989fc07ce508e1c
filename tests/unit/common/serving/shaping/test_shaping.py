import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import StartupError
from common.serving.shaping.pieces import ContentPiece, PlainShaper, ReasoningPiece, Shaper, ToolCallPiece, held_back
from common.serving.shaping.reasoning import ReasoningShaper, reasoning_tags
from common.serving.shaping.tool_calls import NamedToolShaper, RequiredToolShaper, TaggedToolShaper, tool_tags


def shaped(shaper: Shaper, *texts: str) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, reasoning and calls of the whole."""
    pieces = [piece for text in texts for piece in shaper.push(text)] + shaper.flush()
    content = "".join(p.text for p in pieces if isinstance(p, ContentPiece))
    reasoning = "".join(p.text for p in pieces if isinstance(p, ReasoningPiece))
    calls: dict[int, list[str]] = {}
    for piece in pieces:
        if isinstance(piece, ToolCallPiece):
            if piece.name is not None:
                assert piece.index not in calls, "a call is named once"
                calls[piece.index] = [piece.name, ""]
            calls[piece.index][1] += piece.arguments
    assert list(calls) == list(range(len(calls)))
    return content, reasoning, [(name, arguments) for name, arguments in calls.values()]


def cuts(text: str) -> st.SearchStrategy[list[str]]:
    """All ways to receive `text` in pieces."""
    return st.lists(st.integers(0, len(text)), max_size=8).map(
        lambda at: [text[a:b] for a, b in zip([0, *sorted(at)], [*sorted(at), len(text)], strict=True)]
    )


def test_plain_text_is_content():
    assert shaped(PlainShaper(), "a", "", "b") == ("ab", "", [])


THOUGHT = "<think>\nlet me see</think>\n\nThe answer"


@settings(max_examples=60)
@given(texts=cuts(THOUGHT))
def test_thinking_is_cut_off_the_answer_however_the_text_arrives(texts):
    shaper = ReasoningShaper(reasoning_tags("think"), PlainShaper(), inside=False)
    content, reasoning, _ = shaped(shaper, *texts)
    assert reasoning == "\nlet me see"
    assert content.lstrip("\n") == "The answer"


def test_an_answer_that_does_not_think_is_content_at_once():
    shaper = ReasoningShaper(reasoning_tags("think"), PlainShaper(), inside=False)
    assert shaper.push("Hello") == [ContentPiece("Hello")]


def test_thinking_opened_by_the_prompt_needs_no_start_tag():
    shaper = ReasoningShaper(reasoning_tags("deepseek_r1"), PlainShaper(), inside=False)
    assert shaped(shaper, "hm</th", "ink>yes") == ("yes", "hm", [])


def test_thinking_that_never_ends_stays_reasoning_and_loses_nothing():
    shaper = ReasoningShaper(reasoning_tags("think"), PlainShaper(), inside=True)
    assert shaped(shaper, "hm </thi") == ("", "hm </thi", [])


def test_a_named_tools_arguments_are_the_whole_text():
    assert shaped(NamedToolShaper("f"), '{"x"', ": 1}") == ("", "", [("f", '{"x": 1}')])


CALLS = '[{"name": "f", "parameters": {"x": "}]\\"{", "y": [1, {"z": null}]}}, {"parameters": {}, "name": "g\\u00e9"}]'


@settings(max_examples=60)
@given(texts=cuts(CALLS))
def test_required_calls_stream_as_written_however_the_text_arrives(texts):
    _, _, calls = shaped(RequiredToolShaper(), *texts)
    assert calls == [("f", '{"x": "}]\\"{", "y": [1, {"z": null}]}'), ("gé", "{}")]


def test_arguments_stream_as_soon_as_the_name_is_known():
    shaper = RequiredToolShaper()
    assert shaper.push('[{"name": "f", "parameters": {"a": ') == [ToolCallPiece(index=0, name="f", arguments='{"a": ')]
    assert shaper.push("12") == [ToolCallPiece(index=0, arguments="12")]


def test_a_call_cut_short_shows_what_there_was_of_it():
    assert shaped(RequiredToolShaper(), '[{"name": "f", "parameters": {"a": "b')[2] == [("f", '{"a": "b')]


def test_a_call_without_arguments_has_an_empty_object():
    assert shaped(RequiredToolShaper(), '[{"name":"f"}]')[2] == [("f", "{}")]


TAGGED = (
    'Sure.\n<tool_call>\n{"name": "f", "arguments": {"s": "</tool_call>"}}\n</tool_call>\n'
    '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
)


@settings(max_examples=60)
@given(texts=cuts(TAGGED))
def test_tagged_calls_never_leak_their_markup(texts):
    content, _, calls = shaped(TaggedToolShaper(tool_tags("hermes")), *texts)
    assert content == "Sure."
    assert calls == [("f", '{"s": "</tool_call>"}'), ("g", "{}")]


@pytest.mark.parametrize("text", ["a <b> c", "a < tool_call", "<tool_call>nonsense</tool_call>", "x <tool_call>{", "<"])
def test_text_that_is_no_call_comes_back_whole(text):
    for texts in ([text], list(text)):
        content, _, calls = shaped(TaggedToolShaper(tool_tags("hermes")), *texts)
        assert not calls
        assert content.replace(" ", "") == text.replace(" ", "")


@settings(max_examples=60)
@given(
    calls=st.lists(
        st.tuples(
            st.text(min_size=1, max_size=5),
            st.dictionaries(
                st.text(max_size=4),
                st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists),
                max_size=3,
            ),
        ),
        max_size=3,
    ),
    data=st.data(),
)
def test_any_calls_come_out_as_they_went_in(calls, data):
    text = json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])
    _, _, found = shaped(RequiredToolShaper(), *data.draw(cuts(text)))
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


def test_only_what_may_become_the_tag_is_held_back():
    assert [held_back(text, "<think>") for text in ("", "a", "a<", "<thin", "<thinx", "<<")] == [0, 0, 1, 5, 0, 1]


@pytest.mark.parametrize("lookup", [reasoning_tags, tool_tags])
def test_an_unknown_parser_stops_the_start(lookup):
    with pytest.raises(StartupError, match="no-such"):
        lookup("no-such")

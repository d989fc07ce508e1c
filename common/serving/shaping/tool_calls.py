"""Tool calls apart from content, in the three ways a model can be made to write them.

Owns: the shapers for a named tool, for required tools, and for calls a model writes between tags of its own accord.
Does not know: JSON (call_scanner), how the grammar forced the form.
"""

from common.errors import StartupError
from common.openai.tool_calls import ToolTags
from common.serving.shaping.call_scanner import CallScanner
from common.serving.shaping.pieces import ContentPiece, Piece, ToolCallPiece, held_back

_TAGS = {
    "hermes": ToolTags("<tool_call>", "</tool_call>"),
    "qwen": ToolTags("<tool_call>", "</tool_call>"),
}


def tool_tags(name: str) -> ToolTags:
    """The tags of a `tool_parser`.

    Raises:
        StartupError: unknown name.
    """
    if name not in _TAGS:
        raise StartupError(f"tool_parser {name!r} is unknown; there are {', '.join(sorted(_TAGS))}")
    return _TAGS[name]


class NamedToolShaper:
    """`tool_choice` names a tool: the whole text is that call's arguments."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> list[Piece]:
        """See `Shaper`."""
        if not text:
            return []
        name, self._name = self._name, None
        return [ToolCallPiece(index=0, name=name, arguments=text)]

    def flush(self) -> list[Piece]:
        """See `Shaper`."""
        return []


class RequiredToolShaper:
    """`tool_choice: required`: the text is a JSON array of calls, or one call."""

    def __init__(self) -> None:
        self._scanner = CallScanner()

    def push(self, text: str) -> list[Piece]:
        """See `Shaper`."""
        return list(self._scanner.push(text))

    def flush(self) -> list[Piece]:
        """See `Shaper`. A call cut short has shown what there was of it."""
        return []


class TaggedToolShaper:
    """Content, and calls between tags; text between tags that is no call stays content, tags included.

    Args:
        tags: what encloses one call.
    """

    def __init__(self, tags: ToolTags) -> None:
        self._tags = tags
        self._scanner = CallScanner()
        self._inside = False
        self._held = ""
        self._region = ""
        self._region_has_call = False

    def push(self, text: str) -> list[Piece]:
        """See `Shaper`."""
        pieces: list[Piece] = []
        rest = self._held + text
        self._held = ""
        while rest:
            rest = self._read_call(rest, pieces) if self._inside else self._read_content(rest, pieces)
        return pieces

    def flush(self) -> list[Piece]:
        """See `Shaper`."""
        if self._inside:
            return self._leave(self._held, closed=False)
        held, self._held = self._held, ""
        return self._content(held)

    def _read_content(self, text: str, pieces: list[Piece]) -> str:
        before, found, rest = text.partition(self._tags.start)
        if found:
            pieces += self._content(before.rstrip())
            self._inside = True
            self._region, self._region_has_call = self._tags.start, False
            return rest
        # White space before a tag belongs to the tag, so it waits too.
        keep = held_back(before, self._tags.start)
        keep += len(before[: len(before) - keep]) - len(before[: len(before) - keep].rstrip())
        self._held = before[len(before) - keep :]
        pieces += self._content(before[: len(before) - keep])
        return ""

    def _read_call(self, text: str, pieces: list[Piece]) -> str:
        """Feed the scanner; the end tag counts only outside the call's JSON, where it cannot be part of a string."""
        position = 0
        while position < len(text):
            if not self._scanner.inside_call:
                end = self._tags.end
                if text.startswith(end, position):
                    pieces += self._leave("", closed=True)
                    return text[position + len(end) :]
                if end.startswith(text[position:]):
                    self._held = text[position:]
                    return ""
            new = self._scanner.push(text[position])
            self._region_has_call |= bool(new)
            self._region = "" if self._region_has_call else self._region + text[position]
            pieces += _merged(new, pieces)
            position += 1
        return ""

    def _leave(self, held: str, *, closed: bool) -> list[Piece]:
        self._inside, self._held = False, ""
        region, self._region = self._region + held, ""
        if self._region_has_call:
            return []
        # Nothing in there was a call: give the text back as it was written, and forget the half-read object.
        self._scanner = CallScanner(self._scanner.next_index)
        return self._content(region + (self._tags.end if closed else ""))

    def _content(self, text: str) -> list[Piece]:
        """`text` as content; white space alone between calls is layout."""
        after_calls = self._scanner.next_index > 0
        return [ContentPiece(text)] if text and not (after_calls and text.isspace()) else []


def _merged(new: list[ToolCallPiece], pieces: list[Piece]) -> list[Piece]:
    """`new`, after adding what continues the last piece to it."""
    rest: list[Piece] = []
    for piece in new:
        last = pieces[-1] if pieces and not rest else None
        if isinstance(last, ToolCallPiece) and piece.name is None and piece.index == last.index:
            pieces[-1] = ToolCallPiece(index=last.index, name=last.name, arguments=last.arguments + piece.arguments)
        else:
            rest.append(piece)
    return rest

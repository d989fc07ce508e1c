"""Thinking apart from the answer, by the tags that enclose it.

Owns: the tags by parser name and the cut. Does not know: tokens; the grammar's start after the end tag is the core's.
"""

from dataclasses import dataclass
from enum import Enum

from common.errors import StartupError
from common.serving.shaping.pieces import Piece, ReasoningPiece, Shaper, held_back


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningTags:
    """`starts_inside`: the template has already opened the thinking, so the text begins within it."""

    start: str
    end: str
    starts_inside: bool = False


_TAGS = {
    "think": ReasoningTags(start="<think>", end="</think>"),
    "qwen3": ReasoningTags(start="<think>", end="</think>"),
    "deepseek_r1": ReasoningTags(start="<think>", end="</think>", starts_inside=True),
    "magistral": ReasoningTags(start="[THINK]", end="[/THINK]"),
}


def reasoning_tags(name: str) -> ReasoningTags:
    """The tags of a `reasoning_parser`.

    Raises:
        StartupError: unknown name.
    """
    if name not in _TAGS:
        raise StartupError(f"reasoning_parser {name!r} is unknown; there are {', '.join(sorted(_TAGS))}")
    return _TAGS[name]


class _Place(Enum):
    START = "start"  # nothing but white space so far: a start tag may come
    INSIDE = "inside"
    AFTER = "after"


class ReasoningShaper:
    """Reasoning up to the end tag, then whatever `inner` makes of the rest.

    Args:
        tags: what encloses the thinking.
        inner: shapes the text after it.
        inside: whether the prompt already opened the thinking.
    """

    def __init__(self, tags: ReasoningTags, inner: Shaper, *, inside: bool) -> None:
        self._tags = tags
        self._inner = inner
        self._place = _Place.INSIDE if inside or tags.starts_inside else _Place.START
        self._held = ""

    def push(self, text: str) -> list[Piece]:
        """See `Shaper`."""
        text, self._held = self._held + text, ""
        if self._place is _Place.START:
            text = self._open(text)
        if self._place is _Place.INSIDE:
            return self._think(text)
        return self._inner.push(text) if self._place is _Place.AFTER else []

    def flush(self) -> list[Piece]:
        """See `Shaper`. Thinking that never ended stays reasoning."""
        held, self._held = self._held, ""
        if self._place is _Place.INSIDE:
            return [ReasoningPiece(held)] if held else []
        pieces = self._inner.push(held) if held else []
        return pieces + self._inner.flush()

    def _open(self, text: str) -> str:
        """Decide whether the text begins with thinking; returns what is left to read, or holds all of it."""
        start = self._tags.start
        stripped = text.lstrip()
        if stripped.startswith(start):
            self._place = _Place.INSIDE
            return stripped[len(start) :]
        if start.startswith(stripped):
            self._held = text
            return ""
        self._place = _Place.AFTER
        return text

    def _think(self, text: str) -> list[Piece]:
        thought, found, rest = text.partition(self._tags.end)
        if not found:
            keep = held_back(thought, self._tags.end)
            self._held = thought[len(thought) - keep :]
            thought = thought[: len(thought) - keep]
        pieces: list[Piece] = [ReasoningPiece(thought)] if thought else []
        if found:
            self._place = _Place.AFTER
            pieces += self._inner.push(rest.lstrip("\n"))
        return pieces

"""What a chat answer is made of, and the port of whatever cuts text into it (journey row 9).

Owns: the piece types, the port, and the shaper of plain text. Does not know: tags, JSON.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ContentPiece:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """Text of the model's thinking."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallPiece:
    """A part of the `index`-th call; the first part of a call carries its name, later ones None."""

    index: int
    name: str | None = None
    arguments: str = ""


Piece = ContentPiece | ReasoningPiece | ToolCallPiece


class Shaper(Protocol):
    """Cuts one choice's text; has state, one per choice."""

    def push(self, text: str) -> list[Piece]:
        """Pieces that are certain after `text`; what may still become a tag is held back."""
        ...

    def flush(self) -> list[Piece]:
        """What was held back, when the text has ended."""
        ...


class PlainShaper:
    """All text is content."""

    def push(self, text: str) -> list[Piece]:
        """`text` as content."""
        return [ContentPiece(text)] if text else []

    def flush(self) -> list[Piece]:
        """Nothing is ever held back."""
        return []


def held_back(text: str, tag: str) -> int:
    """How many characters at the end of `text` may be the beginning of `tag`."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if tag.startswith(text[-length:]):
            return length
    return 0

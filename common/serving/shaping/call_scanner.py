"""Tool calls out of JSON text that is still being written.

    [{"name": "f", "parameters": {"x": 1}}, ...
              ^ name is known            ^ arguments stream from here, as written

Owns: the scanner of `{"name": ..., "arguments" | "parameters": ...}` objects. Does not know: tags, tokens.
"""

import json
from enum import Enum

from common.serving.shaping.pieces import ToolCallPiece

_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_OPEN, _CLOSE = frozenset("{["), frozenset("}]")


class _Expect(Enum):
    OBJECT = "object"  # between calls
    KEY = "key"
    COLON = "colon"
    VALUE = "value"


class CallScanner:
    """Reads calls one after the other; whatever stands between two objects is skipped.

    Args:
        first_index: index of the first call found.
    """

    def __init__(self, first_index: int = 0) -> None:
        self._next_index = first_index
        self._expect = _Expect.OBJECT
        self._value = _Value()
        self._key = ""
        self._call = _Call(first_index)

    @property
    def inside_call(self) -> bool:
        """Whether an object has been opened and not closed."""
        return self._expect is not _Expect.OBJECT

    @property
    def next_index(self) -> int:
        """Index the next call will get."""
        return self._next_index

    def push(self, text: str) -> list[ToolCallPiece]:
        """What `text` adds to calls; a call shows once its name is known."""
        pieces: list[ToolCallPiece] = []
        for character in text:
            self._step(character, pieces)
        pieces += self._call.take()
        return pieces

    def _step(self, character: str, pieces: list[ToolCallPiece]) -> None:
        if self._expect is _Expect.VALUE:
            self._step_value(character, pieces)
        elif self._expect is _Expect.COLON:
            self._expect = _Expect.VALUE if character == ":" else _Expect.COLON
        elif self._expect is _Expect.OBJECT:
            self._expect = _Expect.KEY if character == "{" else _Expect.OBJECT
        else:
            self._step_key(character, pieces)

    def _step_key(self, character: str, pieces: list[ToolCallPiece]) -> None:
        if self._value.started:
            if self._value.add(character):
                self._key, self._value = _decoded(self._value.raw), _Value()
                self._expect = _Expect.COLON
        elif character == '"':
            self._value.add(character)
        elif character == "}":
            self._close(pieces)

    def _step_value(self, character: str, pieces: list[ToolCallPiece]) -> None:
        if not self._value.started and character.isspace():
            return
        if self._value.is_scalar and (character in ",}" or character.isspace()):
            self._end_value()
            if character == "}":
                self._close(pieces)
            return
        done = self._value.add(character)
        if self._key in _ARGUMENT_KEYS:
            self._call.add_arguments(character)
        if done:
            self._end_value()

    def _end_value(self) -> None:
        if self._key == "name":
            self._call.name = _decoded(self._value.raw)
        self._value, self._expect = _Value(), _Expect.KEY

    def _close(self, pieces: list[ToolCallPiece]) -> None:
        self._call.close()
        pieces += self._call.take()
        if self._call.name is not None:
            self._next_index += 1
        self._call = _Call(self._next_index)
        self._expect = _Expect.OBJECT


class _Call:
    """One call being read: arguments wait until the name is known."""

    def __init__(self, index: int) -> None:
        self.name: str | None = None
        self._index = index
        self._shown = False
        self._waiting: list[str] = []
        self._has_arguments = False

    def add_arguments(self, text: str) -> None:
        """More of them, as JSON text."""
        self._has_arguments = True
        self._waiting.append(text)

    def close(self) -> None:
        """The call is over: one without arguments has empty ones."""
        if not self._has_arguments:
            self._waiting.append("{}")

    def take(self) -> list[ToolCallPiece]:
        """What can be shown and was not yet: nothing before the name is known."""
        if self.name is None or (self._shown and not self._waiting):
            return []
        name = None if self._shown else self.name
        piece = ToolCallPiece(index=self._index, name=name, arguments="".join(self._waiting))
        self._shown = True
        self._waiting.clear()
        return [piece]


class _Value:
    """One JSON value being read; knows its end without the characters after it, scalars excepted."""

    def __init__(self) -> None:
        self._characters: list[str] = []
        self._depth = 0
        self._in_string = False
        self._escaped = False

    @property
    def raw(self) -> str:
        """Its text so far."""
        return "".join(self._characters)

    @property
    def started(self) -> bool:
        """Whether it has any text."""
        return bool(self._characters)

    @property
    def is_scalar(self) -> bool:
        """A number or literal, which ends where something else begins."""
        return self.started and self._characters[0] not in '{["'

    def add(self, character: str) -> bool:
        """Take one character; whether the value ended with it."""
        self._characters.append(character)
        if self._in_string:
            self._step_string(character)
        elif character == '"':
            self._in_string = True
            return False
        elif character in _OPEN:
            self._depth += 1
        elif character in _CLOSE:
            self._depth -= 1
        return self._depth == 0 and not self._in_string and not self.is_scalar

    def _step_string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False


def _decoded(raw: str) -> str:
    """The text of a JSON string; of anything else, its own spelling."""
    try:
        value = json.loads(raw)
    except ValueError:
        return raw
    return value if isinstance(value, str) else raw

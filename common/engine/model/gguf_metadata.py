"""Typed access to the key-value part of a GGUF file.

Owns: reading values and saying which key is wrong. Does not know what the keys mean.
"""

from pathlib import Path
from typing import TypeVar

import msgspec
from gguf import GGUFReader

from common.errors import StartupError

ValueT = TypeVar("ValueT")


class GgufMetadata:
    """Keys of one file; a missing key without a default, or one of another type, is a StartupError naming it.

    Args:
        path: for messages.
        reader: the open file.
    """

    def __init__(self, path: Path, reader: GGUFReader) -> None:
        self._path = path
        self._fields = reader.fields

    def text(self, key: str, default: str | None = None) -> str | None:
        """A string, or `default` where the key is absent."""
        return self._get(key, str, default)

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer; required when `default` is None."""
        return self._required(key, self._get(key, int, default))

    def optional_integer(self, key: str) -> int | None:
        """An integer, or None where the key is absent."""
        return self._get(key, int, None)

    def number(self, key: str, default: float | None = None) -> float:
        """A float (an integer counts); required when `default` is None."""
        return self._required(key, self._get(key, float, default))

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        return self._required(key, self._get(key, bool, default))

    def texts(self, key: str) -> list[str]:
        """A required array of strings."""
        return self._required(key, self._get(key, list[str], None))

    def integers(self, key: str) -> list[int]:
        """A required array of integers."""
        return self._required(key, self._get(key, list[int], None))

    def _get(self, key: str, kind: type[ValueT], default: ValueT | None) -> ValueT | None:
        field = self._fields.get(key)
        if field is None:
            return default
        try:
            return msgspec.convert(field.contents(), type=kind)
        except msgspec.ValidationError as error:
            raise StartupError(f"{self._path}: GGUF key {key}: {error}") from error

    def _required(self, key: str, value: ValueT | None) -> ValueT:
        if value is None:
            raise StartupError(f"{self._path}: GGUF key {key} is missing")
        return value

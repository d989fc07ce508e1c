"""The container format of a GGUF file: header, key-value pairs, where each tensor's bytes lie.

Owns: parsing, and dequantising through the `gguf` package. Its `GGUFReader` makes a numpy view per string of the
vocabulary, seconds per start; this reads the same header in a tenth of that. Does not know what keys mean.
Source: GGUF specification, version 3 (little-endian).
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from common.errors import StartupError

ValueT = TypeVar("ValueT")
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Where one tensor lies. shape: outermost dimension first (the file has it innermost first)."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int


class _Cursor:
    """Reads values one after another from the mapped file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def scalar(self, layout: str) -> int | float | bool:
        """One little-endian number."""
        (value,) = struct.unpack_from(layout, self._data, self.position)
        self.position += struct.calcsize(layout)
        return value  # type: ignore[no-any-return]  # struct's values are as the layout says

    def integer(self, layout: str) -> int:
        """One number of an integer layout."""
        return int(self.scalar(layout))

    def text(self) -> str:
        """Length and UTF-8 bytes."""
        end = self.integer("<Q") + self.position
        if end > len(self._data):
            raise ValueError("a string runs past the end of the file")
        raw = self._data[self.position : end]
        self.position = end
        return raw.decode("utf-8", errors="replace")

    def value(self, kind: int) -> object:
        """A value of a metadata type."""
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        item_kind, count = self.integer("<I"), self.integer("<Q")
        if item_kind not in _SCALARS:
            return [self.value(item_kind) for _ in range(count)]
        layout = f"<{count}{_SCALARS[item_kind][1:]}"
        values = struct.unpack_from(layout, self._data, self.position)
        self.position += struct.calcsize(layout)
        return list(values)


class GgufFile:
    """An open file, memory-mapped; tensors are read when asked for.

    Args:
        path: a `.gguf` file.

    Raises:
        StartupError: it cannot be opened or is not a GGUF file of version 2 or 3.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._metadata, self._tensors, self._start = _parse(self._data)
        except (OSError, ValueError, LookupError, struct.error, MemoryError) as error:
            raise StartupError(f"{path}: not a readable GGUF file: {error}") from error

    @property
    def tensor_names(self) -> frozenset[str]:
        """GGUF names of all tensors."""
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, outermost dimension first."""
        return self._tensor(name).shape

    def read_tensor(self, name: str) -> torch.Tensor:
        """A tensor as float32 on the CPU, dequantised.

        Raises:
            StartupError: it is missing, cut short, or of a quantisation the `gguf` package cannot read.
        """
        tensor = self._tensor(name)
        block_values, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        *rows, row_values = tensor.shape
        row_bytes = row_values // block_values * block_bytes
        start = self._start + tensor.offset
        try:
            raw = np.frombuffer(self._data, np.uint8, prod(rows) * row_bytes, start).reshape(*rows, row_bytes)
            values = dequantize(raw, tensor.kind)
        except (NotImplementedError, ValueError) as error:
            raise StartupError(f"{self.path}: tensor {name}: {error}") from error
        return torch.from_numpy(np.array(values, dtype=np.float32)).view(tensor.shape)

    def get(self, key: str, kind: type[ValueT], default: ValueT | None = None) -> ValueT | None:
        """The value of a key, or `default` where it is absent.

        Raises:
            StartupError: it is there with another type.
        """
        if key not in self._metadata:
            return default
        try:
            return msgspec.convert(self._metadata[key], type=kind)
        except msgspec.ValidationError as error:
            raise StartupError(f"{self.path}: GGUF key {key}: {error}") from error

    def require(self, key: str, kind: type[ValueT], default: ValueT | None = None) -> ValueT:
        """The value of a key that must be there unless there is a `default`.

        Raises:
            StartupError: it is missing, or of another type.
        """
        value = self.get(key, kind, default)
        if value is None:
            raise StartupError(f"{self.path}: GGUF key {key} is missing")
        return value

    def _tensor(self, name: str) -> _Tensor:
        if name not in self._tensors:
            raise StartupError(f"{self.path}: tensor {name} is missing")
        return self._tensors[name]


def _parse(data: mmap.mmap) -> tuple[dict[str, object], dict[str, _Tensor], int]:
    """Metadata, tensors, and where tensor data starts.

        magic | version | #tensors | #pairs | pairs ... | tensor headers ... | padding | data

    Raises:
        ValueError, LookupError, struct.error: this is no such file.
    """
    cursor = _Cursor(data)
    magic, version = data[:4], struct.unpack_from("<I", data, 4)[0]
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"magic {magic!r}, version {version}")
    cursor.position = 8
    num_tensors, num_pairs = cursor.integer("<Q"), cursor.integer("<Q")
    metadata = {cursor.text(): cursor.value(cursor.integer("<I")) for _ in range(num_pairs)}
    tensors: dict[str, _Tensor] = {}
    for _ in range(num_tensors):
        name = cursor.text()
        dimensions = [cursor.integer("<Q") for _ in range(cursor.integer("<I"))]
        kind = GGMLQuantizationType(cursor.integer("<I"))
        tensors[name] = _Tensor(tuple(reversed(dimensions)), kind, cursor.integer("<Q"))
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"alignment {alignment}")
    return metadata, tensors, -(-cursor.position // alignment) * alignment

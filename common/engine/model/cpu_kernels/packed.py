"""Weights packed once, in the order the kernels stream them.

Owns: the packed bytes of a matrix and the choice of its format. Does not know which layer it belongs to.
"""

import ctypes
from enum import IntEnum
from typing import Literal

import torch

from common.engine.model.cpu_kernels.library import Packed, load_library
from common.engine.model.cpu_kernels.threads import Threads
from common.errors import StartupError

WeightDtype = Literal["float32", "bfloat16", "int8"]
GROUP_SIZE = 32
HUGE_PAGE_BYTES = 2 << 20
ALIGNMENT = 64


class PackedFormat(IntEnum):
    """How weights are stored; groups of 32 inputs share half-precision scales.

    Q8: `scale * int8 + minimum`. Q8_SYMMETRIC: `scale * int8` (GGUF's Q8_0).
    Q4: `scale * uint4 + minimum` (GGUF's Q4_1). _TILES: the same numbers laid out for the tile unit (AMX).
    """

    FLOAT32 = 0
    BFLOAT16 = 1
    Q8 = 2
    Q8_SYMMETRIC = 3
    Q4 = 4
    BFLOAT16_TILES = 5
    Q8_TILES = 6
    Q8_SYMMETRIC_TILES = 7
    Q4_TILES = 8


def formats_for(dtype: WeightDtype, *, tiles: bool | None = None) -> tuple[PackedFormat, ...]:
    """The formats a matrix may get, tried in order: the last one always fits, the others only if they lose nothing.

    So int8 keeps what is already quantised as it is, at 4 or 8 bits.

    Args:
        dtype: of the weights.
        tiles: for the tile unit or for vectors; None: the tile unit where there is one.
    """
    tiles = bool(load_library().pd_has_tiles()) if tiles is None else tiles
    if dtype == "float32":
        return (PackedFormat.FLOAT32,)
    if dtype == "bfloat16":
        return (PackedFormat.BFLOAT16_TILES if tiles else PackedFormat.BFLOAT16,)
    if tiles:
        return (PackedFormat.Q4_TILES, PackedFormat.Q8_SYMMETRIC_TILES, PackedFormat.Q8_TILES)
    return (PackedFormat.Q4, PackedFormat.Q8_SYMMETRIC, PackedFormat.Q8)


class Arena:
    """One stretch of memory on large pages that packed matrices are placed into one behind the other.

    Args:
        capacity_bytes: most that will be taken; pages never taken cost nothing.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._memory = torch.empty(capacity_bytes + HUGE_PAGE_BYTES, dtype=torch.uint8)
        start = self._memory.data_ptr()
        self._next = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self._end = start + self._memory.numel()
        self._start = self._next
        load_library().pd_advise_huge(self._next, self._end - self._next)

    @property
    def used_bytes(self) -> int:
        """Taken so far."""
        return self._next - self._start

    def address(self) -> int:
        """Where the next piece will be."""
        return self._next

    def take(self, num_bytes: int) -> int:
        """The address of `num_bytes` bytes, at a multiple of `ALIGNMENT`.

        Raises:
            StartupError: the arena is full.
        """
        address = self._next
        if address + num_bytes > self._end:
            raise StartupError(f"packed weights: {num_bytes} bytes do not fit into the arena")
        self._next += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return address


class PackedLinear:
    """A weight matrix `[out_features, in_features]` (and bias) in packed form; immutable.

    Args:
        weight: float, any layout, on the CPU; `in_features` must be a multiple of 32.
        bias: float `[out_features]` or None.
        formats: tried in order (`formats_for`).
        threads: that pack it, and later multiply by it in `__call__`.
        paired: two matrices of equal height stacked (gate, up), to be multiplied with `Out.SILU`.
        arena: where to put it; default its own memory.

    Raises:
        StartupError: `in_features` is not a multiple of 32.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        formats: tuple[PackedFormat, ...],
        threads: Threads,
        *,
        paired: bool = False,
        arena: Arena | None = None,
    ) -> None:
        self.out_features, self.in_features = weight.shape
        if self.in_features % GROUP_SIZE:
            raise StartupError(f"packed weights: {self.in_features} inputs are not a multiple of {GROUP_SIZE}")
        self._library = load_library()
        self._threads = threads
        self._paired = paired
        source = weight.to(torch.float32).contiguous()
        self._arena = arena or Arena(packed_bytes_bound(self.out_features, self.in_features, formats, paired=paired))
        self.format = self._pack(source, formats)
        self._bias = None if bias is None else self._pack_bias(bias)
        self.struct.bias = None if self._bias is None else self._bias.data_ptr()

    def _pack(self, source: torch.Tensor, formats: tuple[PackedFormat, ...]) -> PackedFormat:
        library = self._library
        for chosen in formats:
            is_last = chosen is formats[-1]
            self.struct = Packed(chosen, self._paired, self.out_features, self.in_features, self._arena.address(), None)
            handle, to = self._threads.handle, self._arena.address()
            exact = library.pd_pack(handle, ctypes.byref(self.struct), source.data_ptr(), to, not is_last)
            if exact or is_last:
                break
        self.num_bytes = int(library.pd_packed_bytes(ctypes.byref(self.struct)))
        self._arena.take(self.num_bytes)
        return chosen

    def _pack_bias(self, bias: torch.Tensor) -> torch.Tensor:
        source = bias.to(torch.float32).contiguous()
        packed = torch.empty(self._library.pd_packed_columns(ctypes.byref(self.struct)), dtype=torch.float32)
        self._library.pd_pack_bias(ctypes.byref(self.struct), source.data_ptr(), packed.data_ptr())
        return packed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x @ weight.T + bias`, float32 `[m, in_features] -> [m, out_features]`.

        Paired matrices give silu(gate) * up, `[m, out_features / 2]`.
        A row's result is the same bits for any `m` and any number of threads.
        """
        rows = x.to(torch.float32).contiguous()
        width = self.out_features // 2 if self._paired else self.out_features
        out = torch.empty((rows.shape[0], width), dtype=torch.float32)
        if rows.shape[0]:
            self._library.pd_linear(
                self._threads.handle,
                ctypes.byref(self.struct),
                rows.data_ptr(),
                self.in_features,
                rows.shape[0],
                out.data_ptr(),
                width,
                2 if self._paired else 0,
            )
        return out

    def row(self, index: int) -> torch.Tensor:
        """Row `index` of the weight as it is stored, float32 `[in_features]` (not for paired matrices)."""
        out = torch.empty(self.in_features, dtype=torch.float32)
        self._library.pd_unpack_row(ctypes.byref(self.struct), index, out.data_ptr())
        return out


def packed_bytes_bound(
    out_features: int, in_features: int, formats: tuple[PackedFormat, ...], *, paired: bool = False
) -> int:
    """What a matrix takes in the largest of these formats, padding included."""
    shapes = [Packed(one, paired, out_features, in_features, None, None) for one in formats]
    return max(int(load_library().pd_packed_bytes(ctypes.byref(shape))) for shape in shapes) + ALIGNMENT

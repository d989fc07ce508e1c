"""The compiled steps of sampling as Python calls them; calls release the GIL and stay on the calling thread.

Owns: the signatures of csrc/sampler.cpp and the loaded library. Building is `common.engine.model.cpu_kernels.build`'s.
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import structlog
import torch

from common.engine.model.cpu_kernels.build import CannotBuild, ensure_built
from common.engine.sampling.batch_state import IntArray
from common.engine.sampling.cuts import Cuts
from common.engine.sampling.random import Keys

SOURCES = Path(__file__).parent / "csrc"
SIGNATURES: dict[str, list[type]] = {
    "pd_mask": [c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64],
    "pd_highest": [c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64, *[c_void_p] * 4],
    "pd_draw": [c_void_p, c_int64, c_void_p, c_int64, *[c_void_p] * 7],
    "pd_log_normaliser": [c_void_p, c_int64, c_int64, c_void_p],
    "pd_count_above": [c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p],
    "pd_exp": [c_void_p, c_int64, c_void_p],
    "pd_noise": [c_uint64, c_uint64, c_int64, c_void_p],
}
RESULTS = {"pd_highest": c_int64}
_LOG = structlog.get_logger(__name__)


class DrawnRows:
    """Logits rows to draw from and their parameters, laid out for the library once per plan.

    Args:
        rows: logits rows, int64 [n].
        inverse_temperature: float32 [n].
        cuts: of these rows.
    """

    def __init__(self, rows: IntArray, inverse_temperature: npt.NDArray[np.float32], cuts: Cuts) -> None:
        unscaled = np.ones_like(inverse_temperature)
        arrays = (rows, inverse_temperature, unscaled, cuts.top_k, cuts.top_p, cuts.min_p)
        self._kept = tuple(np.ascontiguousarray(array) for array in arrays)
        self.count = len(rows)
        self.rows, inverse, ones, *cut = (array.ctypes.data for array in self._kept)
        self.scaling = (inverse, *cut)
        self.without_scaling = (ones, *cut)


class GreedyRows:
    """Logits rows that take their highest logit and where that goes, laid out for the library once per plan.

    Args:
        rows: logits rows, int64 [n].
        tokens: int64 CPU [R], of all logits rows.
        usable: bool CPU [R], likewise.
    """

    def __init__(self, rows: IntArray, tokens: torch.Tensor, usable: torch.Tensor) -> None:
        self._rows = np.ascontiguousarray(rows)
        self._out = (tokens, usable)  # the library is told their addresses only
        self._token_values = memoryview(tokens.numpy().data)  # its `tolist` touches less than numpy's or torch's
        self._masked_rows: tuple[int, ...] = ()
        self._mask_of: IntArray | None = None
        self._known: torch.Tensor | None = None
        self.count = len(rows)
        self.rows = self._rows.ctypes.data
        self.tokens, self.usable = tokens.data_ptr(), usable.data_ptr()
        self.mask_of: int | None = None
        self.known: int | None = None

    def mask(self, masked_rows: Sequence[int]) -> None:
        """Say which logits rows a bitmask masks, in its order; they stay until others are named."""
        if self._mask_of is None or self._masked_rows != masked_rows:
            place_of = {row: place for place, row in enumerate(masked_rows)}
            self._mask_of = np.array([place_of.get(row, -1) for row in self._rows.tolist()], dtype=np.int64)
            self._masked_rows, self.mask_of = tuple(masked_rows), self._mask_of.ctypes.data

    def know(self, tokens: torch.Tensor | None) -> None:
        """Say where the first highest token of each logits row without a mask stands: int64 CPU [R], -1: not known."""
        if tokens is not self._known:
            self._known, self.known = tokens, None if tokens is None else tokens.data_ptr()

    def token_list(self) -> list[int]:
        """Tokens of all R logits rows as they now stand."""
        return self._token_values.tolist()


class SamplingKernels:
    """What `common.engine.sampling.sampler` calls instead of torch; logits are contiguous float32 CPU [R, vocab_size].

    Raises:
        CannotBuild: there is no library here.
    """

    def __init__(self) -> None:
        self._library = _load()

    def mask(self, logits: torch.Tensor, bitmask: torch.Tensor, rows: IntArray) -> None:
        """Set the logits of forbidden tokens to -inf, in place; bitmask int32 CPU [M, W] is that of `rows` [M]."""
        bitmask = bitmask.contiguous()
        self._library.pd_mask(
            logits.data_ptr(), logits.shape[1], rows.ctypes.data, len(rows), bitmask.data_ptr(), bitmask.shape[1]
        )

    def highest(self, logits: torch.Tensor, greedy: GreedyRows, bitmask: torch.Tensor | None = None) -> int:
        """First highest token of each greedy row, and whether there is one, into the memory that `greedy` names.

        Args:
            logits: not changed.
            greedy: which rows, which of them `bitmask` masks, and what is known: where that is allowed, its row is not
                read.
            bitmask: int32 CPU [M, W]; what it forbids does not count. None: every token may come.

        Returns:
            How many of the rows have none.
        """
        if bitmask is not None:
            bitmask = bitmask.contiguous()
        return int(
            self._library.pd_highest(
                logits.data_ptr(),
                logits.shape[1],
                greedy.rows,
                greedy.count,
                bitmask.data_ptr() if bitmask is not None else None,
                bitmask.shape[1] if bitmask is not None else 0,
                greedy.mask_of if bitmask is not None else None,
                greedy.known,
                greedy.tokens,
                greedy.usable,
            )
        )

    def draw(
        self,
        logits: torch.Tensor,
        drawn: DrawnRows,
        keys: Keys,
        out: tuple[torch.Tensor, torch.Tensor],
        *,
        is_scaled: bool,
    ) -> None:
        """Draw a token for each of the drawn rows.

        Args:
            logits: not changed.
            drawn: which rows, n of them.
            keys: uint64 [n] from `row_keys`.
            out: tokens int64 [R] and usable bool [R]; only the drawn rows are written.
            is_scaled: the temperature has been applied already.
        """
        tokens, usable = out
        inverse, *cuts = drawn.without_scaling if is_scaled else drawn.scaling
        self._library.pd_draw(
            logits.data_ptr(),
            logits.shape[1],
            drawn.rows,
            drawn.count,
            keys.ctypes.data,
            inverse,
            *cuts,
            tokens.data_ptr(),
            usable.data_ptr(),
        )

    def log_normaliser(self, scores: torch.Tensor) -> torch.Tensor:
        """Log of the sum of exponentials of each row, float32 [n]; NaN where a row has no finite highest score."""
        out = torch.empty(scores.shape[0])
        self._library.pd_log_normaliser(scores.data_ptr(), scores.shape[1], scores.shape[0], out.data_ptr())
        return out

    def count_above(self, scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """How many scores of each row are above each of its values float32 [n, m]; int64 [n, m]."""
        values = values.contiguous()
        counts = torch.empty(values.shape, dtype=torch.int64)
        self._library.pd_count_above(
            scores.data_ptr(), *scores.shape[::-1], values.data_ptr(), values.shape[1], counts.data_ptr()
        )
        return counts

    def exp(self, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The exponential of float32 [n], none above 0."""
        x = np.ascontiguousarray(x)
        out = np.empty_like(x)
        self._library.pd_exp(x.ctypes.data, x.size, out.ctypes.data)
        return out

    def noise(self, key: int, first_id: int, count: int) -> npt.NDArray[np.float32]:
        """`random.exponential_noise` of one key and ids from `first_id` on, float32 [count]."""
        out = np.empty(count, dtype=np.float32)
        self._library.pd_noise(key, first_id, count, out.ctypes.data)
        return out


@cache
def kernels_for(device: torch.device) -> SamplingKernels | None:
    """The kernels where logits on `device` can use them; None (logged once, with the reason) means torch."""
    if device.type != "cpu":
        return None
    try:
        return SamplingKernels()
    except CannotBuild as error:
        _LOG.warning("sampling_kernels.unavailable", reason=str(error), fallback="torch")
        return None


@cache
def _load() -> ctypes.CDLL:
    path = ensure_built(sources=SOURCES)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise CannotBuild(f"sampling kernels: {path} does not load: {error}") from error
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = RESULTS.get(name), arguments
    return library

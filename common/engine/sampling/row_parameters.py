"""The numbers of every persistent row, and what a step makes of them.

Owns: host arrays of scalar parameters, and the plan of a step (which of its rows are greedy, cut, want logprobs). The
plan is rebuilt only when rows or batch change, so a steady batch does no work per row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from common.engine.sampling.batch_state import AddedRow, IntArray
from common.engine.sampling.cpu_kernels.library import DrawnRows, GreedyRows
from common.engine.sampling.cuts import Cuts
from common.engine.sampling.draw import DrawChunk, as_index, chunks_of
from common.engine.sampling.params import SamplingParams
from common.engine.sampling.random import Keys, mix64


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobRequest:
    """What one logits row reports: `count` alternatives (the vocabulary size: all), or these `token_ids`."""

    count: int
    token_ids: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """What is common to steps with the same logits rows.

    Attributes:
        persistent: persistent row of each logits row, length R.
        host_rows: the same, int64 [R].
        index: the same, int64 [R] on the device.
        greedy_rows: logits rows that take their highest logit, int64 [g], host.
        chunks: the other rows, to be drawn.
        drawn_rows: all of them in the order of the chunks, int64 [n], host; `drawn` is the same as an index.
        drawing: the same with their parameters, for the kernels.
        seed_keys: `mix64` of their seeds, uint64 [n], host.
        temperature: float32 [R, 1] on the device, 1.0 for greedy rows; None when all are 1.0.
        logprobs: per logits row, None where nothing is asked.
        logprob_rows: index of the logits rows that ask; None when nobody does.
        token_ids, usable: memory for what a step draws, int64 and bool [R] on the device; every step writes all of it.
        greedy: `greedy_rows` and that memory, for the kernels; None on other devices.
    """

    persistent: tuple[int, ...]
    host_rows: IntArray
    index: torch.Tensor
    greedy_rows: IntArray
    chunks: tuple[DrawChunk, ...]
    drawn_rows: IntArray
    drawn: slice | torch.Tensor
    drawing: DrawnRows
    seed_keys: Keys
    temperature: torch.Tensor | None
    logprobs: tuple[LogprobRequest | None, ...]
    logprob_rows: slice | torch.Tensor | None
    token_ids: torch.Tensor
    usable: torch.Tensor
    greedy: GreedyRows | None


class RowParameters:
    """Scalar parameters of the persistent rows, on the host.

    Args:
        vocab_size: `top_k` at or above it is off.
        max_rows: persistent rows.
        device: where the logits live.
    """

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._temperature: npt.NDArray[np.float32] = np.zeros(max_rows, dtype=np.float32)
        self._top_k: IntArray = np.zeros(max_rows, dtype=np.int64)
        self._top_p: npt.NDArray[np.float64] = np.ones(max_rows)
        self._min_p: npt.NDArray[np.float32] = np.zeros(max_rows, dtype=np.float32)
        self._seed_key: Keys = np.zeros(max_rows, dtype=np.uint64)
        self._logprobs: list[LogprobRequest | None] = [None] * max_rows

    def set(self, added: AddedRow) -> None:
        """Take over an added row's parameters."""
        row, params = added.row, added.params
        self._temperature[row] = params.temperature
        self._top_k[row] = params.top_k if params.top_k < self._vocab_size else 0
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._seed_key[row] = mix64(added.seed)
        self._logprobs[row] = self._logprob_request(params)

    def move(self, source: int, target: int) -> None:
        """Copy `source` to `target`."""
        arrays = (self._temperature, self._top_k, self._top_p, self._min_p, self._seed_key)
        for array in arrays:
            array[target] = array[source]
        self._logprobs[target] = self._logprobs[source]

    def plan(self, rows: Sequence[int]) -> StepPlan:
        """The plan of a step whose logits rows belong to these persistent rows."""
        host = np.asarray(rows, dtype=np.int64)
        temperature = self._temperature[host]
        greedy = temperature == 0
        scale = np.where(greedy, np.float32(1.0), temperature)
        is_cut = (self._top_k[host] > 0) | (self._top_p[host] < 1) | (self._min_p[host] > 0)
        drawn = [np.flatnonzero(~greedy & ~is_cut), np.flatnonzero(~greedy & is_cut)]
        drawn_rows = np.concatenate(drawn)
        chunks = [
            self._chunk(piece, host, cuts=bool(cuts))
            for cuts, chosen in enumerate(drawn)
            for piece in chunks_of(chosen, self._vocab_size, self._device)
        ]
        wants = tuple(self._logprobs[row] for row in rows)
        asking = [row for row, want in enumerate(wants) if want is not None]
        greedy_rows = np.flatnonzero(greedy)
        token_ids = torch.empty(len(rows), dtype=torch.int64, device=self._device)
        usable = torch.empty(len(rows), dtype=torch.bool, device=self._device)
        return StepPlan(
            persistent=tuple(rows),
            host_rows=host,
            index=self._to_device(host),
            greedy_rows=greedy_rows,
            chunks=tuple(chunks),
            drawn_rows=drawn_rows,
            drawn=as_index(drawn_rows, self._device) if drawn_rows.size else slice(0, 0),
            drawing=DrawnRows(drawn_rows, np.reciprocal(scale[drawn_rows]), self._cuts(host[drawn_rows])),
            seed_keys=self._seed_key[host[drawn_rows]],
            temperature=None if (scale == 1).all() else self._to_device(scale).unsqueeze(1),
            logprobs=wants,
            logprob_rows=as_index(np.array(asking, dtype=np.int64), self._device) if asking else None,
            token_ids=token_ids,
            usable=usable,
            greedy=GreedyRows(greedy_rows, token_ids, usable) if self._device.type == "cpu" else None,
        )

    def _chunk(self, piece: IntArray, host: IntArray, *, cuts: bool) -> DrawChunk:
        """Parameters of some logits rows int64 [n] of a step whose persistent rows are `host` int64 [R]."""
        rows = host[piece]
        temperature = self._temperature[rows]
        return DrawChunk(
            rows=as_index(piece, self._device),
            num_rows=piece.size,
            temperature=None if (temperature == 1).all() else self._to_device(temperature).unsqueeze(1),
            cuts=self._cuts(rows) if cuts else None,
        )

    def _cuts(self, rows: IntArray) -> Cuts:
        return Cuts(self._top_k[rows], self._top_p[rows], self._min_p[rows])

    def _logprob_request(self, params: SamplingParams) -> LogprobRequest | None:
        if params.logprobs is None and params.logprob_token_ids is None:
            return None
        count = params.logprobs or 0
        return LogprobRequest(count=self._vocab_size if count < 0 else count, token_ids=params.logprob_token_ids)

    def _to_device(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

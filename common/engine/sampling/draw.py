"""Draw the tokens of random rows: temperature, cuts and race, a few rows at a time.

Owns: everything between the logits greedy sampling sees and a drawn token. Rows are taken in chunks that stay in the
processor's cache; a row's result depends on that row alone. Does not change the logits it is given, except where the
processed logits are to be reported.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.engine.sampling.batch_state import IntArray
from common.engine.sampling.cuts import Cuts, keep, thresholds
from common.engine.sampling.device_cuts import thresholds as thresholds_on_device
from common.engine.sampling.device_race import race_on_device
from common.engine.sampling.race import Heat, first_round, group_noise, joined, second_round
from common.engine.sampling.random import Keys
from common.engine.sampling.top_values import GROUP_SIZE, rows_per_chunk


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawChunk:
    """Random rows that are drawn together; all of them are cut, or none.

    Attributes:
        rows: logits rows, to index tensors: a slice where they follow one another (then nothing is copied).
        num_rows: how many.
        temperature: float32 [num_rows, 1] on the device; None when all are 1.0.
        cuts: None: nothing is cut.
    """

    rows: slice | torch.Tensor
    num_rows: int
    temperature: torch.Tensor | None
    cuts: Cuts | None


def chunks_of(rows: IntArray, vocab_size: int, device: torch.device) -> list[IntArray]:
    """Logits rows int64 [n] in pieces of a good size for the device."""
    size = max(1, rows.size) if device.type != "cpu" else rows_per_chunk(vocab_size)
    return [rows[start : start + size] for start in range(0, rows.size, size)]


def as_index(rows: IntArray, device: torch.device) -> slice | torch.Tensor:
    """The cheapest way to take these rows out of a tensor."""
    start, stop = int(rows[0]), int(rows[-1]) + 1
    if stop - start == rows.size and (rows[1:] > rows[:-1]).all():
        return slice(start, stop)
    return torch.from_numpy(rows).to(device)


class Drawer:
    """Draws, on CPU in memory of its own.

    Args:
        vocab_size: width of the logits.
        device: where they live.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._on_host = device.type == "cpu"
        self._memory = torch.empty(rows_per_chunk(vocab_size) if self._on_host else 0, vocab_size, device=device)

    def draw(
        self,
        logits: torch.Tensor,
        chunks: Sequence[DrawChunk],
        keys: Keys,
        *,
        is_scaled: bool,
        report_processed: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw one token for each row of the chunks.

        Args:
            logits: float32 [R, vocab_size] of the whole step.
            chunks: which rows; n of them in all.
            keys: uint64 [n] from `row_keys`, in the order of the chunks.
            is_scaled: temperature has been applied already.
            report_processed: write the processed logits of these rows back.

        Returns:
            tokens int64 [n] in the order of the chunks, and bool [n]: False where no token was left.
        """
        run = self._draw_on_host if self._on_host else self._draw_on_device
        return run(logits, chunks, keys, is_scaled=is_scaled, report_processed=report_processed)

    def _draw_on_host(
        self,
        logits: torch.Tensor,
        chunks: Sequence[DrawChunk],
        keys: Keys,
        *,
        is_scaled: bool,
        report_processed: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        noise = group_noise(keys, -(-self._vocab_size // GROUP_SIZE))
        heats: list[Heat] = []
        start = 0
        for chunk in chunks:
            taken = logits[chunk.rows]
            temperature = None if is_scaled else chunk.temperature
            weights = self._weigh_on_host(taken, temperature)
            if chunk.cuts is not None:
                weights = keep(weights, thresholds(weights, chunk.cuts))
            if report_processed:
                logits[chunk.rows] = _processed(taken, temperature, weights, is_cut=chunk.cuts is not None)
            heats.append(first_round(weights, noise[start : start + chunk.num_rows]))
            start += chunk.num_rows
        return second_round(joined(heats), keys)

    def _draw_on_device(
        self,
        logits: torch.Tensor,
        chunks: Sequence[DrawChunk],
        keys: Keys,
        *,
        is_scaled: bool,
        report_processed: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, usable = [], []
        start = 0
        for chunk in chunks:
            taken = logits[chunk.rows]
            temperature = None if is_scaled else chunk.temperature
            weights = self._whole_groups(torch.softmax(taken if temperature is None else taken / temperature, dim=1))
            if chunk.cuts is not None:
                weights = keep(weights, thresholds_on_device(weights, chunk.cuts))
            if report_processed:
                logits[chunk.rows] = _processed(taken, temperature, weights, is_cut=chunk.cuts is not None)
            drawn, is_usable = race_on_device(weights, keys[start : start + chunk.num_rows])
            tokens.append(drawn)
            usable.append(is_usable)
            start += chunk.num_rows
        return torch.cat(tokens), torch.cat(usable)

    def _weigh_on_host(self, logits: torch.Tensor, temperature: torch.Tensor | None) -> torch.Tensor:
        """Weights float32 [n, G * GROUP_SIZE] in proportion to the softmax of float32 [n, vocab_size].

        Not normalised, as a race needs no sum: that saves passes over memory. The highest weight of a row is 1.
        The next call overwrites them.
        """
        weights = torch.sub(logits, logits.amax(dim=1, keepdim=True), out=self._memory[: logits.shape[0]])
        if temperature is not None:
            weights = weights.mul_(temperature.reciprocal())
        return self._whole_groups(weights.exp_())

    def _whole_groups(self, weights: torch.Tensor) -> torch.Tensor:
        """Add zeros to float32 [n, vocab_size] up to whole groups."""
        missing = -self._vocab_size % GROUP_SIZE
        return torch.nn.functional.pad(weights, (0, missing)) if missing else weights


def _processed(
    logits: torch.Tensor, temperature: torch.Tensor | None, weights: torch.Tensor, *, is_cut: bool
) -> torch.Tensor:
    """Logits float32 [n, vocab_size] as they are drawn from: scaled, and -inf where they are cut."""
    if temperature is not None:
        logits = logits / temperature
    return logits.masked_fill(weights[:, : logits.shape[1]] == 0, -torch.inf) if is_cut else logits

"""Draw the tokens of random rows: temperature, cuts and race, a few rows at a time.

Owns: everything between the logits greedy sampling sees and a drawn token. Rows are taken in chunks that stay in the
processor's cache; a row's result depends on that row alone. Does not change the logits it is given, except where the
processed logits are to be reported.
"""

from dataclasses import dataclass

import torch

from common.engine.sampling.batch_state import IntArray
from common.engine.sampling.processors.top_k_top_p import Cuts, keep, thresholds
from common.engine.sampling.race import race
from common.engine.sampling.random import Keys, row_keys

_CHUNK_ELEMENTS = 1 << 20
"""Logits of a chunk on CPU: 4 MB and the copies made of them stay in the outer caches."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawChunk:
    """Random rows that are drawn together; all of them are cut, or none.

    Attributes:
        host_rows: logits rows int64 [n].
        rows: the same, to index tensors: a slice where they follow one another (then nothing is copied).
        seed_keys: uint64 [n], host.
        temperature: float32 [n, 1] on the device; None when all are 1.0.
        cuts: None: nothing is cut.
    """

    host_rows: IntArray
    rows: slice | torch.Tensor
    seed_keys: Keys
    temperature: torch.Tensor | None
    cuts: Cuts | None


def chunks_of(rows: IntArray, vocab_size: int, device: torch.device) -> list[IntArray]:
    """Logits rows int64 [n] in pieces of a good size for the device."""
    if device.type != "cpu":
        return [rows] if rows.size else []
    size = max(1, _CHUNK_ELEMENTS // vocab_size)
    return [rows[start : start + size] for start in range(0, rows.size, size)]


def as_index(rows: IntArray, device: torch.device) -> slice | torch.Tensor:
    """The cheapest way to take these ascending rows out of a tensor."""
    if rows[-1] - rows[0] + 1 == rows.size:
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows).to(device)


def draw(
    logits: torch.Tensor, chunk: DrawChunk, positions: IntArray, *, is_scaled: bool, report_processed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token for each row of the chunk.

    Args:
        logits: float32 [R, vocab_size] of the whole step.
        chunk: which rows.
        positions: output position of every logits row, int64 [R], host.
        is_scaled: temperature has been applied already.
        report_processed: write the processed logits of these rows back.

    Returns:
        tokens int64 [n] and bool [n]: False where no token was left.
    """
    processed = logits[chunk.rows]
    if chunk.temperature is not None and not is_scaled:
        processed = processed.div(chunk.temperature)
    weights = torch.softmax(processed, dim=1)
    if chunk.cuts is not None:
        weights = keep(weights, thresholds(weights, chunk.cuts))
    if report_processed:
        logits[chunk.rows] = processed.masked_fill(weights == 0, -torch.inf)
    return race(weights, row_keys(chunk.seed_keys, positions[chunk.host_rows]))

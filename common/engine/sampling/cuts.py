"""`min_p`, `top_k` and `top_p`: which tokens stay, decided by one threshold per row.

Owns: the cut, for weights in host memory (`device_cuts` is the same in torch). Each of the three keeps everything
at or above a probability, so ties stay together, the result does not depend on the order of token ids, and all of them
together are the highest of their thresholds:
    min_p   probability >= min_p * the highest probability
    top_k   probability >= the k-th highest probability
    top_p   mass of strictly likelier tokens < top_p of the mass that min_p and top_k left
Heads of growing length are sorted until the nucleus of a row is inside; only the last resort is a full sort. Source:
Holtzman et al. 2020 (top_p), Nguyen et al. 2024 (min_p).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from common.engine.sampling.top_values import FloatArray, group_maxima, highest_on_host

HEADS = (64, 1024)
"""Highest probabilities sorted first, then next, when looking for a nucleus."""
_LOWEST = 2.0**-60
"""A threshold below this is taken as this: such a token comes once in 10^18."""
_BELOW_ONE = 1.0 - 2.0**-24
"""The largest float32 below 1."""
DoubleArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Cuts:
    """Parameters of n rows, host arrays [n]: top_k int64 (off: 0), top_p float64 (off: 1), min_p float32 (off: 0)."""

    top_k: npt.NDArray[np.int64]
    top_p: DoubleArray
    min_p: FloatArray


def thresholds(weights: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    """The lowest weight that stays in each row; 0 keeps all.

    Args:
        weights: float32 CPU [n, m] in proportion to the probabilities, the highest of a row 1, then zeros up to whole
            groups; not changed.
        cuts: of these rows.

    Returns:
        float32 [n].
    """
    longest = int(cuts.top_k.max())
    has_top_p = bool((cuts.top_p < 1).any())
    if not (longest or has_top_p):
        return torch.from_numpy(cuts.min_p)
    lowest = cuts.min_p
    maxima: FloatArray = group_maxima(weights).numpy()
    if longest:
        head = highest_on_host(weights.numpy(), longest, maxima)
        kth = head[np.arange(len(head)), np.maximum(cuts.top_k - 1, 0)]
        lowest = np.maximum(lowest, np.where(cuts.top_k > 0, kth, np.float32(0)))
    if has_top_p:
        masses = weights.sum(dim=1).numpy()
        lowest = np.maximum(lowest, _nucleus_edge(weights.numpy(), maxima, masses, lowest, cuts.top_p))
    return torch.from_numpy(lowest)


def keep(weights: torch.Tensor, lowest: torch.Tensor) -> torch.Tensor:
    """Make weights 0 below `lowest` float32 [n] and scale them by it elsewhere; float32 [n, m], in place, any device.

    Scaled first, so that all rows share the threshold 1 and one vectorised pass applies it. Division rounds correctly:
    no value below the threshold becomes 1.
    """
    return torch.threshold_(weights.div_(lowest.clamp(min=_LOWEST).unsqueeze(1)), _BELOW_ONE, 0.0)


def _nucleus_edge(
    weights: FloatArray, maxima: FloatArray, masses: FloatArray, lowest: FloatArray, top_p: DoubleArray
) -> FloatArray:
    """The lowest weight inside each nucleus, float32 [n]; 0 where top_p is off.

    Args:
        weights: float32 [n, m].
        maxima: of its groups.
        masses: of its rows.
        lowest: float32 [n], what min_p and top_k keep; the nucleus is a share of that mass.
        top_p: float64 [n].
    """
    size = weights.shape[1]
    edges = np.zeros_like(lowest)
    open_rows = np.flatnonzero(top_p < 1)
    for length in (*(head for head in HEADS if head < size), size):
        is_all = len(open_rows) == len(top_p)
        chosen = slice(None) if is_all else open_rows
        head = highest_on_host(weights[chosen], length, maxima[chosen])
        edges[open_rows], is_inside = _edges(head, masses[chosen], lowest[chosen], top_p[chosen])
        open_rows = open_rows[~is_inside]
        if not open_rows.size:
            break
    return edges


def _edges(
    head: FloatArray, masses: FloatArray, lowest: FloatArray, share: DoubleArray
) -> tuple[FloatArray, BoolArray]:
    """Where each nucleus ends in a descending head of its row.

    Args:
        head: float32 [n, count], the highest weights, descending.
        masses: float32 [n], sums of the whole rows.
        lowest: float32 [n], entries below it are gone already; 0: nothing is.
        share: float64 [n], of the mass that is left.

    Returns:
        The last value inside, float32 [n], and bool [n]: False where the head is too short to tell.
    """
    stays = head >= lowest[:, None]
    mass = np.cumsum(head * stays, axis=1, dtype=np.float64)
    uncut = lowest <= 0
    wanted = share * np.where(uncut, masses, mass[:, -1])
    inside = ((mass - head < wanted[:, None]) & stays).sum(axis=1)
    edges = head[np.arange(len(head)), np.maximum(inside - 1, 0)]
    return edges, np.where(uncut, mass[:, -1] >= wanted, ~stays[:, -1])

"""`min_p`, `top_k` and `top_p`: which tokens stay, decided by one threshold per row.

Owns: the cut. Each of the three keeps everything at or above a probability, so ties stay together, the result does not
depend on the order of token ids, and all of them together are the highest of their thresholds:
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

from common.engine.sampling.top_values import highest

_HEADS = (64, 1024)
"""Highest probabilities sorted first, then next, when looking for a nucleus."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """Parameters of n rows, host arrays [n]: top_k int64 (off: 0), top_p float64 (off: 1), min_p float64 (off: 0)."""

    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float64]


def thresholds(probabilities: torch.Tensor, maxima: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    """The lowest probability that stays in each row; 0 keeps all.

    Args:
        probabilities: float32 [n, m], softmax of the logits, then zeros up to whole groups; not changed.
        maxima: of its groups, float32 [n, G], from `group_maxima`.
        cuts: of these rows.

    Returns:
        float32 [n] on the same device.
    """
    lowest = torch.zeros(probabilities.shape[0], device=probabilities.device)
    if (cuts.min_p > 0).any():
        lowest = _moved(cuts.min_p.astype(np.float32), lowest) * maxima.amax(dim=1)
    if (cuts.top_k > 0).any():
        lowest = torch.maximum(lowest, _kth_highest(probabilities, maxima, cuts.top_k))
    if (cuts.top_p < 1).any():
        lowest = torch.maximum(lowest, _nucleus_edge(probabilities, maxima, lowest, cuts.top_p))
    return lowest


def _moved(values: npt.NDArray[np.generic], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(like.device)


def _kth_highest(probabilities: torch.Tensor, maxima: torch.Tensor, k: npt.NDArray[np.int64]) -> torch.Tensor:
    """The k-th highest value of each row, float32 [n]; 0 where k is 0."""
    active = k > 0
    head = highest(probabilities, int(k.max()), maxima)
    place = _moved(np.where(active, k - 1, 0), probabilities).unsqueeze(1)
    return head.gather(1, place).squeeze(1).masked_fill_(_moved(~active, probabilities), 0.0)


def _nucleus_edge(
    probabilities: torch.Tensor, maxima: torch.Tensor, lowest: torch.Tensor, top_p: npt.NDArray[np.float64]
) -> torch.Tensor:
    """The lowest probability inside each nucleus, float32 [n]; 0 where top_p is off.

    Args:
        probabilities: float32 [n, m].
        maxima: of its groups.
        lowest: float32 [n], what min_p and top_k keep; the nucleus is a share of that mass.
        top_p: float64 [n].
    """
    size = probabilities.shape[1]
    edges = torch.zeros_like(lowest)
    whole = probabilities.sum(dim=1).to(torch.float64)
    open_rows = np.flatnonzero(top_p < 1)
    for length in (*(head for head in _HEADS if head < size), size):
        rows = _moved(open_rows, probabilities)
        is_all = len(open_rows) == len(top_p)
        head = highest(*((probabilities, length, maxima) if is_all else (probabilities[rows], length, maxima[rows])))
        edges[rows], is_inside = _edges(head, lowest[rows], _moved(top_p[open_rows], probabilities), whole[rows])
        open_rows = open_rows[~is_inside.cpu().numpy()]
        if not open_rows.size:
            break
    return edges


def _edges(
    head: torch.Tensor, lowest: torch.Tensor, share: torch.Tensor, whole: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each nucleus ends in a descending head of its row.

    Args:
        head: float32 [n, count], the highest probabilities, descending.
        lowest: float32 [n], entries below it are gone already.
        share: float64 [n], of the mass that is left.
        whole: float64 [n], mass of the whole row.

    Returns:
        The last value inside, float32 [n], and bool [n]: False where the head is too short to tell.
    """
    stays = head >= lowest.unsqueeze(1)
    mass = (head * stays).to(torch.float64).cumsum(dim=1)
    uncut = lowest <= 0
    wanted = share * torch.where(uncut, whole, mass[:, -1])
    before = mass - head
    inside = ((before < wanted.unsqueeze(1)) & stays).sum(dim=1).clamp_(min=1)
    edges = head.gather(1, (inside - 1).unsqueeze(1)).squeeze(1)
    return edges, torch.where(uncut, mass[:, -1] >= wanted, ~stays[:, -1])

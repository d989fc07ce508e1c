"""`common.engine.sampling.cuts` in torch, for probabilities on a device: the same thresholds.

Owns: nothing but the other way to compute them.
"""

import numpy as np
import numpy.typing as npt
import torch

from common.engine.sampling.cuts import HEADS, Cuts


def thresholds(probabilities: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    """The lowest probability that stays in each row; 0 keeps all.

    Args:
        probabilities: float32 [n, m], softmax of the logits, then zeros up to whole groups; not changed.
        cuts: of these rows.

    Returns:
        float32 [n] on the same device.
    """
    lowest = torch.zeros(probabilities.shape[0], device=probabilities.device)
    if (cuts.min_p > 0).any():
        lowest = _moved(cuts.min_p, lowest) * probabilities.amax(dim=1)
    if (cuts.top_k > 0).any():
        lowest = torch.maximum(lowest, _kth_highest(probabilities, cuts.top_k))
    if (cuts.top_p < 1).any():
        lowest = torch.maximum(lowest, _nucleus_edge(probabilities, lowest, cuts.top_p))
    return lowest


def _moved(values: npt.NDArray[np.generic], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(like.device)


def _kth_highest(probabilities: torch.Tensor, k: npt.NDArray[np.int64]) -> torch.Tensor:
    """The k-th highest value of each row, float32 [n]; 0 where k is 0."""
    active = k > 0
    head = probabilities.topk(int(k.max()), dim=1).values
    place = _moved(np.where(active, k - 1, 0), probabilities).unsqueeze(1)
    return head.gather(1, place).squeeze(1).masked_fill_(_moved(~active, probabilities), 0.0)


def _nucleus_edge(probabilities: torch.Tensor, lowest: torch.Tensor, top_p: npt.NDArray[np.float64]) -> torch.Tensor:
    """The lowest probability inside each nucleus, float32 [n]; 0 where top_p is off.

    Args:
        probabilities: float32 [n, m].
        lowest: float32 [n], what min_p and top_k keep; the nucleus is a share of that mass.
        top_p: float64 [n].
    """
    size = probabilities.shape[1]
    edges = torch.zeros_like(lowest)
    masses = probabilities.sum(dim=1)
    open_rows = np.flatnonzero(top_p < 1)
    for length in (*(head for head in HEADS if head < size), size):
        rows = _moved(open_rows, probabilities)
        is_all = len(open_rows) == len(top_p)
        head = (probabilities if is_all else probabilities[rows]).topk(length, dim=1).values
        edges[rows], is_inside = _edges(head, masses[rows], lowest[rows], _moved(top_p[open_rows], probabilities))
        open_rows = open_rows[~is_inside.cpu().numpy()]
        if not open_rows.size:
            break
    return edges


def _edges(
    head: torch.Tensor, masses: torch.Tensor, lowest: torch.Tensor, share: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each nucleus ends in a descending head of its row.

    Args:
        head: float32 [n, count], the highest probabilities, descending.
        masses: float32 [n], sums of the whole rows.
        lowest: float32 [n], entries below it are gone already; 0: nothing is.
        share: float64 [n], of the mass that is left.

    Returns:
        The last value inside, float32 [n], and bool [n]: False where the head is too short to tell.
    """
    stays = head >= lowest.unsqueeze(1)
    mass = (head * stays).to(torch.float64).cumsum(dim=1)
    uncut = lowest <= 0
    wanted = share * torch.where(uncut, masses.to(torch.float64), mass[:, -1])
    before = mass - head
    inside = ((before < wanted.unsqueeze(1)) & stays).sum(dim=1).clamp_(min=1)
    edges = head.gather(1, (inside - 1).unsqueeze(1)).squeeze(1)
    return edges, torch.where(uncut, mass[:, -1] >= wanted, ~stays[:, -1])

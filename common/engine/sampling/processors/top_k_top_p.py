"""`min_p`, `top_k` and `top_p`: which tokens stay, decided by thresholds on sorted values.

Owns: the cut. Each keeps everything at or above a threshold, so ties stay together and the result does not depend on
the order of token ids:
    min_p   probability >= min_p * the highest probability
    top_k   logit >= the k-th highest logit
    top_p   mass of strictly likelier tokens < top_p of the mass that min_p and top_k left
Selection is partial where that is enough: numpy's vectorised partition on CPU, a sort of the short head, and a full
sort only for rows whose nucleus is longer. Source: Holtzman et al. 2020 (top_p), Nguyen et al. 2024 (min_p).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

_HEAD = 1024
"""Highest probabilities sorted first when looking for a nucleus."""
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Cuts:
    """Thresholds of n rows, host arrays [n]: top_k int64 (vocab_size = off), top_p and min_p float64 (1, 0 = off)."""

    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float64]


def cut(logits: torch.Tensor, probabilities: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    """Set the probability of dropped tokens to 0, in place.

    Args:
        logits: float32 [n, vocab_size], not changed.
        probabilities: float32 [n, vocab_size], softmax of `logits`; changed in place.
        cuts: of these rows.

    Returns:
        bool [n, vocab_size]: which tokens were dropped.
    """
    vocab_size = logits.shape[1]
    dropped = torch.zeros_like(logits, dtype=torch.bool)
    if (cuts.min_p > 0).any():
        share = torch.from_numpy(cuts.min_p.astype(np.float32)).to(logits.device)
        highest = probabilities.amax(dim=1)
        dropped |= probabilities < (share * highest).unsqueeze(1)
    if (cuts.top_k < vocab_size).any():
        dropped |= logits < kth_highest(logits, cuts.top_k).unsqueeze(1)
    probabilities.masked_fill_(dropped, 0.0)
    if (cuts.top_p < 1).any():
        below = probabilities < nucleus_edge(probabilities, cuts.top_p).unsqueeze(1)
        probabilities.masked_fill_(below, 0.0)
        dropped |= below
    return dropped


def kth_highest(logits: torch.Tensor, k: npt.NDArray[np.int64]) -> torch.Tensor:
    """The k-th highest value of each row: logits float32 [n, vocab_size], k int64 [n] -> float32 [n].

    `k >= vocab_size` gives -inf: nothing is below it.
    """
    vocab_size = logits.shape[1]
    wanted = np.minimum(k, vocab_size)
    if logits.device.type == "cpu":
        places = np.unique(vocab_size - wanted[wanted < vocab_size])
        part = np.partition(logits.numpy(), places, axis=1)
        values = torch.from_numpy(part[np.arange(len(wanted)), vocab_size - wanted])
    else:
        head = logits.topk(int(wanted.max()), dim=1).values
        values = head.gather(1, torch.from_numpy(wanted - 1).to(logits.device).unsqueeze(1)).squeeze(1)
    off = torch.from_numpy(wanted == vocab_size).to(logits.device)
    return values.masked_fill(off, -torch.inf)


def nucleus_edge(probabilities: torch.Tensor, top_p: npt.NDArray[np.float64]) -> torch.Tensor:
    """The lowest probability inside each nucleus.

    Args:
        probabilities: float32 [n, vocab_size], not necessarily adding up to 1.
        top_p: float64 [n]; 1 is off.

    Returns:
        float32 [n]; 0 where top_p is off.
    """
    wanted = torch.from_numpy(top_p).to(probabilities.device) * probabilities.sum(dim=1).to(torch.float64)
    wanted.masked_fill_(torch.from_numpy(top_p >= 1).to(probabilities.device), torch.inf)
    head = _highest(probabilities, min(_HEAD, probabilities.shape[1]))
    edges, reached = _edges(head, wanted)
    off = wanted.isinf()
    longer = torch.nonzero(~(reached | off)).squeeze(1)
    if longer.numel() and head.shape[1] < probabilities.shape[1]:
        rows = probabilities[longer]
        edges[longer], _ = _edges(_highest(rows, rows.shape[1]), wanted[longer])
    return edges.masked_fill_(off, 0.0)


def _highest(probabilities: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` highest of each row float32 [n, vocab_size], in descending order, [n, count]."""
    if probabilities.device.type != "cpu":
        return probabilities.topk(count, dim=1).values
    values: FloatArray = probabilities.numpy()
    if count < values.shape[1]:
        values = np.partition(values, values.shape[1] - count, axis=1)[:, values.shape[1] - count :]
    return torch.from_numpy(np.sort(values, axis=1)[:, ::-1].copy())


def _edges(head: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Last value of each descending row float32 [n, count] whose mass before it is below `wanted` float64 [n].

    Returns: the values float32 [n], and bool [n]: whether the row's mass reaches `wanted`.
    """
    mass = head.to(torch.float64).cumsum(dim=1)
    before = mass - head
    inside = (before < wanted.unsqueeze(1)).sum(dim=1).clamp_(min=1)
    return head.gather(1, (inside - 1).unsqueeze(1)).squeeze(1), mass[:, -1] >= wanted

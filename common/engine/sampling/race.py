"""Draw a token with probability proportional to its weight, as a race of exponential clocks in two rounds.

Owns: the draw. A race is `argmax(weight / noise)` with noise ~ Exp(1): its winner is a draw from the weights, and there
is no division by a sum and no device sync as in `multinomial`. Racing every token needs as much noise as the vocabulary
is wide. The minimum of a group's clocks is itself exponential with the group's total weight, so groups of tokens race
first (noise ids beyond the vocabulary), then the tokens of the winning group (noise ids = token ids): the same
distribution from a few hundred draws per row. Source: order statistics of exponentials; the grouping is ours.
"""

from dataclasses import dataclass

import numpy as np
import torch

from common.engine.sampling.random import Keys, exponential_noise, exponential_noise_on_device
from common.engine.sampling.top_values import GROUP_SIZE

_GROUP_IDS = 1 << 32
"""Noise ids of groups start here, above every token id."""
_LOWEST = 2.0**-60
"""A threshold below this is taken as this: such a token comes once in 10^18."""
_BELOW_ONE = 1.0 - 2.0**-24
"""The largest float32 below 1."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Weights that do not take part: those below `lowest` float32 [n]; `maxima` of the groups, float32 [n, G]."""

    lowest: torch.Tensor
    maxima: torch.Tensor


@dataclass(frozen=True, slots=True)
class Heat:
    """Who won the first round in each of n rows.

    Attributes:
        groups: the winning groups, int64 [n, 1].
        totals: their weight, float32 [n].
        weights: of their tokens, float32 [n, GROUP_SIZE].
    """

    groups: torch.Tensor
    totals: torch.Tensor
    weights: torch.Tensor


def group_noise(keys: Keys, vocab_size: int, device: torch.device) -> torch.Tensor:
    """Noise of the first round, float32 [n, ceil(vocab_size / GROUP_SIZE)], for keys uint64 [n] from `row_keys`."""
    num_groups = -(-vocab_size // GROUP_SIZE)
    return _noise(keys, torch.arange(_GROUP_IDS, _GROUP_IDS + num_groups, device=device))


def first_round(weights: torch.Tensor, noise: torch.Tensor, cut: Cut | None = None) -> Heat:
    """Let the groups race.

    Args:
        weights: float32 [n, G * GROUP_SIZE], not negative; 0 is never drawn.
        noise: float32 [n, G], of these rows, from `group_noise`.
        cut: who does not take part; None: everybody does.
    """
    num_rows, num_groups = noise.shape
    tokens = weights.view(num_rows, num_groups, GROUP_SIZE)
    totals = tokens.sum(dim=2) if cut is None else _totals_left(tokens, cut)
    groups = (totals / noise).argmax(dim=1)
    rows = torch.arange(num_rows, device=weights.device)
    winners = tokens[rows, groups]
    if cut is not None:
        winners = _kept(winners, cut.lowest)
    return Heat(groups.unsqueeze(1), totals[rows, groups], winners)


def _totals_left(tokens: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Totals of groups float32 [n, G, GROUP_SIZE], up to a factor per row; only those with a survivor are read."""
    rows, groups = torch.nonzero(cut.maxima >= cut.lowest.unsqueeze(1), as_tuple=True)
    totals = torch.zeros_like(cut.maxima)
    totals[rows, groups] = _kept(tokens[rows, groups], cut.lowest[rows]).sum(dim=1)
    return totals


def _kept(weights: torch.Tensor, lowest: torch.Tensor) -> torch.Tensor:
    """Weights float32 [m, GROUP_SIZE] that are 0 below `lowest` float32 [m] and scaled by it elsewhere, in place.

    Scaled first, so that all rows share the threshold 1 and one vectorised pass applies it. Division rounds correctly:
    no value below the threshold becomes 1.
    """
    return torch.threshold_(weights.div_(lowest.clamp(min=_LOWEST).unsqueeze(1)), _BELOW_ONE, 0.0)


def second_round(heat: Heat, keys: Keys) -> tuple[torch.Tensor, torch.Tensor]:
    """Let the tokens of the winning groups race.

    Args:
        heat: the first round.
        keys: uint64 [n] from `row_keys`, the same as in the first round.

    Returns:
        tokens int64 [n], and bool [n]: False where the weights are all zero or not numbers (the token means nothing).
    """
    ids = _tokens_of(heat.groups)
    winner = (heat.weights / _noise(keys, ids)).argmax(dim=1, keepdim=True)
    return ids.gather(1, winner).squeeze(1), (heat.totals > 0) & heat.totals.isfinite()


def _tokens_of(groups: torch.Tensor) -> torch.Tensor:
    """Token ids of groups int64 [n, 1] -> int64 [n, GROUP_SIZE]."""
    return groups * GROUP_SIZE + torch.arange(GROUP_SIZE, device=groups.device)


def _noise(keys: Keys, ids: torch.Tensor) -> torch.Tensor:
    """Noise for ids int64 [m] or [n, m] on their device; numpy makes it with less overhead where it can."""
    if ids.device.type == "cpu":
        return torch.from_numpy(exponential_noise(keys, ids.numpy().view(np.uint64)))
    return exponential_noise_on_device(torch.from_numpy(keys.view(np.int64)).to(ids.device), ids)

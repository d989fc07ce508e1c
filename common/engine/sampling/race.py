"""Draw a token with probability proportional to its weight, as a race of exponential clocks in two rounds.

Owns: the draw, for weights in host memory (`device_race` is the same in torch). A race is `argmax(weight / noise)` with
noise ~ Exp(1): its winner is a draw from the weights, without dividing by their sum and without the device sync of
`multinomial`. Racing every token needs as much noise as the vocabulary is wide. The minimum of a group's clocks is
itself exponential with the group's total weight, so groups of tokens race first (noise ids beyond the vocabulary), then
the tokens of the winning group (noise ids = token ids): the same distribution from a few hundred draws per row.
Source: order statistics of exponentials; the grouping is ours.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from common.engine.sampling.random import Keys, exponential_noise
from common.engine.sampling.top_values import GROUP_SIZE, FloatArray

FIRST_GROUP_ID = 1 << 32
"""Noise ids of groups start here, above every token id."""
_TOKENS = np.arange(GROUP_SIZE)


@dataclass(frozen=True, slots=True)
class Heat:
    """Who won the first round in each of n rows.

    Attributes:
        groups: the winning groups, int64 [n].
        totals: their weight, float32 [n].
        weights: of their tokens, float32 [n, GROUP_SIZE].
    """

    groups: npt.NDArray[np.int64]
    totals: FloatArray
    weights: FloatArray


def group_noise(keys: Keys, num_groups: int) -> FloatArray:
    """Noise of the first round, float32 [n, num_groups], for keys uint64 [n] from `row_keys`."""
    return exponential_noise(keys, np.arange(FIRST_GROUP_ID, FIRST_GROUP_ID + num_groups, dtype=np.uint64))


def first_round(weights: torch.Tensor, noise: FloatArray) -> Heat:
    """Let the groups race.

    Args:
        weights: float32 CPU [n, G * GROUP_SIZE], not negative; 0 is never drawn.
        noise: float32 [n, G], of these rows, from `group_noise`.
    """
    grouped = weights.view(*noise.shape, GROUP_SIZE)
    totals: FloatArray = grouped.sum(dim=2).numpy()
    groups = (totals / noise).argmax(axis=1)
    rows = np.arange(len(groups))
    return Heat(groups, totals[rows, groups], grouped.numpy()[rows, groups])


def second_round(heat: Heat, keys: Keys) -> tuple[torch.Tensor, torch.Tensor]:
    """Let the tokens of the winning groups race.

    Args:
        heat: the first round.
        keys: uint64 [n] from `row_keys`, the same as in the first round.

    Returns:
        tokens int64 [n], and bool [n]: False where the weights are all zero or not numbers (the token means nothing).
    """
    ids = heat.groups[:, None] * GROUP_SIZE + _TOKENS
    places = (heat.weights / exponential_noise(keys, ids.view(np.uint64))).argmax(axis=1)
    tokens = heat.groups * GROUP_SIZE + places
    return torch.from_numpy(tokens), torch.from_numpy((heat.totals > 0) & np.isfinite(heat.totals))


def joined(heats: list[Heat]) -> Heat:
    """The rows of several heats, in order."""
    if len(heats) == 1:
        return heats[0]
    return Heat(
        np.concatenate([heat.groups for heat in heats]),
        np.concatenate([heat.totals for heat in heats]),
        np.concatenate([heat.weights for heat in heats]),
    )

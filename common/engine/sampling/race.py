"""Draw a token with probability proportional to its weight, as a race of exponential clocks in two rounds.

Owns: the draw. A race is `argmax(weight / noise)` with noise ~ Exp(1): its winner is a draw from the weights, and there
is no division by a sum and no device sync as in `multinomial`. Racing every token needs as much noise as the vocabulary
is wide. The minimum of a group's clocks is itself exponential with the group's total weight, so groups of tokens race
first (noise ids beyond the vocabulary), then the tokens of the winning group (noise ids = token ids): the same
distribution from a few hundred draws per row. Source: order statistics of exponentials; the grouping is ours.
"""

import numpy as np
import torch

from common.engine.sampling.random import Keys, exponential_noise, exponential_noise_on_device

GROUP_SIZE = 256
"""Tokens per group. Part of what a seed means: another size draws other tokens."""
_GROUP_IDS = 1 << 32
"""Noise ids of groups start here, above every token id."""


def race(weights: torch.Tensor, keys: Keys) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row.

    Args:
        weights: float32 [R, vocab_size], not negative; 0 is never drawn.
        keys: uint64 [R] from `row_keys`.

    Returns:
        tokens int64 [R], and bool [R]: False where the weights are all zero or not numbers (the token means nothing).
    """
    if weights.device.type == "cpu":
        return race_on_host(weights, keys)
    return race_on_device(weights, torch.from_numpy(keys.view(np.int64)).to(weights.device))


def race_on_host(weights: torch.Tensor, keys: Keys) -> tuple[torch.Tensor, torch.Tensor]:
    """`race` for tensors in host memory: many small steps, which numpy takes with less overhead."""
    vocab_size = weights.shape[1]
    totals = group_totals(weights).numpy()
    rows = np.arange(totals.shape[0])
    group_ids = np.arange(_GROUP_IDS, _GROUP_IDS + totals.shape[1], dtype=np.uint64)
    group = (totals / exponential_noise(keys, group_ids)).argmax(axis=1)
    total = totals[rows, group]
    ids = group[:, None] * GROUP_SIZE + np.arange(min(GROUP_SIZE, vocab_size))
    beyond = ids >= vocab_size
    ids[beyond] = 0
    scores = weights.numpy()[rows[:, None], ids] / exponential_noise(keys, ids.astype(np.uint64))
    scores[beyond] = -1.0
    tokens = ids[rows, scores.argmax(axis=1)]
    return torch.from_numpy(tokens), torch.from_numpy((total > 0) & np.isfinite(total))


def race_on_device(weights: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`race` in torch, the same winners: keys int64 [R] on the weights' device."""
    vocab_size = weights.shape[1]
    totals = group_totals(weights)
    group_ids = torch.arange(_GROUP_IDS, _GROUP_IDS + totals.shape[1], device=weights.device)
    group = (totals / exponential_noise_on_device(keys, group_ids)).argmax(dim=1, keepdim=True)
    total = totals.gather(1, group).squeeze(1)
    ids = group * GROUP_SIZE + torch.arange(min(GROUP_SIZE, vocab_size), device=weights.device)
    beyond = ids >= vocab_size
    ids = ids.masked_fill_(beyond, 0)
    scores = weights.gather(1, ids) / exponential_noise_on_device(keys, ids)
    winner = scores.masked_fill_(beyond, -1.0).argmax(dim=1, keepdim=True)
    return ids.gather(1, winner).squeeze(1), (total > 0) & total.isfinite()


def group_totals(weights: torch.Tensor) -> torch.Tensor:
    """Sum of each run of `GROUP_SIZE` weights [R, vocab_size] -> float32 [R, ceil(vocab_size / GROUP_SIZE)]."""
    whole = weights.shape[1] // GROUP_SIZE
    body = weights[:, : whole * GROUP_SIZE].view(weights.shape[0], whole, GROUP_SIZE).sum(dim=2)
    if whole * GROUP_SIZE == weights.shape[1]:
        return body
    rest = weights[:, whole * GROUP_SIZE :].sum(dim=1, keepdim=True)
    return torch.cat((body, rest), dim=1)

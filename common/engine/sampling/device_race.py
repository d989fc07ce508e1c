"""`common.engine.sampling.race` in torch, for weights on a device: the same winners.

Owns: nothing but the other way to run it: no host copy, no device sync.
"""

import numpy as np
import torch

from common.engine.sampling.race import FIRST_GROUP_ID
from common.engine.sampling.random import Keys, exponential_noise_on_device
from common.engine.sampling.top_values import GROUP_SIZE


def race_on_device(weights: torch.Tensor, keys: Keys) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row.

    Args:
        weights: float32 [n, G * GROUP_SIZE], not negative; 0 is never drawn.
        keys: uint64 [n] from `row_keys`, host.

    Returns:
        tokens int64 [n], and bool [n]: False where no token was left.
    """
    device = weights.device
    device_keys = torch.from_numpy(keys.view(np.int64)).to(device)
    tokens = weights.view(weights.shape[0], -1, GROUP_SIZE)
    totals = tokens.sum(dim=2)
    group_ids = torch.arange(FIRST_GROUP_ID, FIRST_GROUP_ID + totals.shape[1], device=device)
    groups = (totals / exponential_noise_on_device(device_keys, group_ids)).argmax(dim=1)
    rows = torch.arange(weights.shape[0], device=device)
    ids = groups.unsqueeze(1) * GROUP_SIZE + torch.arange(GROUP_SIZE, device=device)
    places = (tokens[rows, groups] / exponential_noise_on_device(device_keys, ids)).argmax(dim=1)
    total = totals[rows, groups]
    return groups * GROUP_SIZE + places, (total > 0) & total.isfinite()

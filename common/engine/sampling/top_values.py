"""The highest few values of long rows, without sorting the rows.

Owns: partial selection. On CPU: the `count` highest values of a row lie in the `count` groups with the highest maxima,
so only those groups are looked at; taking maxima is one vectorised pass. Elsewhere torch's own selection does it.
"""

import numpy as np
import numpy.typing as npt
import torch

_GROUP = 64
_WORTH_GROUPING = 4
FloatArray = npt.NDArray[np.float32]
IndexArray = npt.NDArray[np.int64]


def highest(values: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` highest of each row float32 [n, size], descending, float32 [n, count]; `count <= size`."""
    if values.device.type != "cpu":
        return values.topk(count, dim=1).values
    candidates, _ = _candidates(values, count)
    if count < candidates.shape[1]:
        candidates = np.partition(candidates, candidates.shape[1] - count, axis=1)[:, -count:]
    return torch.from_numpy(np.sort(candidates, axis=1)[:, ::-1].copy())


def highest_with_places(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`highest`, and where they are: int64 [n, count]. Of values tied with the last, any may be named."""
    if values.device.type != "cpu" or count == 0:
        found = values.topk(count, dim=1)
        return found.values, found.indices
    candidates, places = _candidates(values, count)
    top = torch.from_numpy(candidates).topk(count, dim=1)
    if places is None:
        return top.values, top.indices
    return top.values, torch.from_numpy(places).gather(1, top.indices)


def _candidates(values: torch.Tensor, count: int) -> tuple[FloatArray, IndexArray | None]:
    """A superset of each row's `count` highest, float32 [n, m], and their places int64 [n, m]; None: all, in order."""
    size = values.shape[1]
    num_groups = size // _GROUP
    host: FloatArray = values.numpy()
    if count * _GROUP * _WORTH_GROUPING > size:
        return host, None
    grouped = values[:, : num_groups * _GROUP].view(values.shape[0], num_groups, _GROUP)
    maxima = grouped.amax(dim=2).numpy()
    chosen = np.argpartition(maxima, num_groups - count, axis=1)[:, -count:]
    places = (chosen[:, :, None] * _GROUP + np.arange(_GROUP)).reshape(values.shape[0], -1)
    rest = np.arange(num_groups * _GROUP, size)
    if rest.size:
        places = np.concatenate((places, np.broadcast_to(rest, (values.shape[0], rest.size))), axis=1)
    return np.take_along_axis(host, places, axis=1), places

"""The highest few values of long rows, without sorting the rows.

Owns: partial selection. On CPU: the `count` highest values of a row lie in the `count` groups with the highest maxima,
so only those groups are looked at; taking maxima is one vectorised pass. Elsewhere torch's own selection does it.
"""

import numpy as np
import numpy.typing as npt
import torch

GROUP_SIZE = 128
"""Values per group; vocabularies are mostly multiples of it. The race's groups are these too, so it is part of what a
seed means: another size draws other tokens."""
_WORTH_GROUPING = 4
_CHUNK_VALUES = 1 << 20
"""4 MB, which stay in the outer caches from the first pass over them to the last."""
FloatArray = npt.NDArray[np.float32]
IndexArray = npt.NDArray[np.int64]


def rows_per_chunk(size: int) -> int:
    """How many rows of `size` values to work on at a time on CPU."""
    return max(1, _CHUNK_VALUES // size)


def group_maxima(values: torch.Tensor) -> torch.Tensor:
    """Highest value of each whole group of float32 [n, size], float32 [n, size // GROUP_SIZE]."""
    num_groups = values.shape[1] // GROUP_SIZE
    return values[:, : num_groups * GROUP_SIZE].view(values.shape[0], num_groups, GROUP_SIZE).amax(dim=2)


def highest(values: torch.Tensor, count: int, maxima: torch.Tensor | None = None) -> torch.Tensor:
    """The `count` highest of each row float32 [n, size], descending, float32 [n, count]; `count <= size`.

    `maxima` are the rows' `group_maxima`, where they are known already.
    """
    if values.device.type != "cpu":
        return values.topk(count, dim=1).values
    candidates: FloatArray = values.numpy()
    if _pays(count, values.shape[1]):
        candidates = _of_groups(values, _best_groups(values, count, maxima))
    if count < candidates.shape[1]:
        candidates = np.partition(candidates, candidates.shape[1] - count, axis=1)[:, -count:]
    return torch.from_numpy(np.sort(candidates, axis=1)[:, ::-1].copy())


def highest_with_places(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`highest`, and where they are: int64 [n, count]. Of values tied with the last, any may be named."""
    if values.device.type != "cpu" or not count or not _pays(count, values.shape[1]):
        found = values.topk(count, dim=1)
        return found.values, found.indices
    groups = _best_groups(values, count)
    top = torch.from_numpy(_of_groups(values, groups)).topk(count, dim=1)
    at = top.indices.numpy()
    # Candidates are the groups one after another, then what follows the last whole group.
    group = np.take_along_axis(groups, np.minimum(at // GROUP_SIZE, count - 1), axis=1)
    rest = at - count * GROUP_SIZE + values.shape[1] // GROUP_SIZE * GROUP_SIZE
    places = np.where(at < count * GROUP_SIZE, group * GROUP_SIZE + at % GROUP_SIZE, rest)
    return top.values, torch.from_numpy(places)


def _pays(count: int, size: int) -> bool:
    """Whether looking at groups is less work than looking at everything."""
    return count * GROUP_SIZE * _WORTH_GROUPING <= size


def _best_groups(values: torch.Tensor, count: int, maxima: torch.Tensor | None = None) -> IndexArray:
    """The groups with the `count` highest maxima of each row, int64 [n, count]."""
    tops = (group_maxima(values) if maxima is None else maxima).numpy()
    return np.argpartition(tops, tops.shape[1] - count, axis=1)[:, -count:]


def _of_groups(values: torch.Tensor, groups: IndexArray) -> FloatArray:
    """Values of the groups int64 [n, count], and of what follows the last whole group; float32 [n, m]."""
    num_rows, size = values.shape
    num_groups = size // GROUP_SIZE
    body = values[:, : num_groups * GROUP_SIZE].view(num_rows, num_groups, GROUP_SIZE).numpy()
    chosen: FloatArray = body[np.arange(num_rows)[:, None], groups].reshape(num_rows, -1)
    if num_groups * GROUP_SIZE == size:
        return chosen
    return np.concatenate((chosen, values[:, num_groups * GROUP_SIZE :].numpy()), axis=1)

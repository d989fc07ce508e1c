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
_CHUNK_VALUES = 1 << 18
"""1 MB, which stays in a core's own cache from the first pass over it to the last."""
FloatArray = npt.NDArray[np.float32]
IndexArray = npt.NDArray[np.int64]


def rows_per_chunk(size: int) -> int:
    """How many rows of `size` values to work on at a time on CPU."""
    return max(1, _CHUNK_VALUES // size)


def group_maxima(values: torch.Tensor) -> torch.Tensor:
    """Highest value of each whole group of float32 [n, size], float32 [n, size // GROUP_SIZE]."""
    num_groups = values.shape[1] // GROUP_SIZE
    return values[:, : num_groups * GROUP_SIZE].view(values.shape[0], num_groups, GROUP_SIZE).amax(dim=2)


def highest_on_host(values: FloatArray, count: int, maxima: FloatArray) -> FloatArray:
    """The `count` highest of each row float32 [n, size], descending, float32 [n, count]; `count <= size`.

    `maxima` are the rows' `group_maxima`.
    """
    if _pays(count, values.shape[1]):
        values = _of_groups(values, _best_groups(maxima, count))
    if count < values.shape[1]:
        values = np.partition(values, values.shape[1] - count, axis=1)[:, -count:]
    return np.sort(values, axis=1)[:, ::-1]


def highest_with_places(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` highest of each row float32 [n, size], descending, and where they are, int64; both [n, count].

    Of values tied with the last, any may be named.
    """
    if values.device.type != "cpu" or not count or not _pays(count, values.shape[1]):
        found = values.topk(count, dim=1)
        return found.values, found.indices
    groups = _best_groups(group_maxima(values).numpy(), count)
    top = torch.from_numpy(_of_groups(values.numpy(), groups)).topk(count, dim=1)
    at = top.indices.numpy()
    # Candidates are the groups one after another, then what follows the last whole group.
    group = np.take_along_axis(groups, np.minimum(at // GROUP_SIZE, count - 1), axis=1)
    rest = at - count * GROUP_SIZE + values.shape[1] // GROUP_SIZE * GROUP_SIZE
    places = np.where(at < count * GROUP_SIZE, group * GROUP_SIZE + at % GROUP_SIZE, rest)
    return top.values, torch.from_numpy(places)


def _pays(count: int, size: int) -> bool:
    """Whether looking at groups is less work than looking at everything."""
    return count * GROUP_SIZE * _WORTH_GROUPING <= size


def _best_groups(maxima: FloatArray, count: int) -> IndexArray:
    """The groups with the `count` highest maxima of each row, int64 [n, count]."""
    return np.argpartition(maxima, maxima.shape[1] - count, axis=1)[:, -count:]


def _of_groups(values: FloatArray, groups: IndexArray) -> FloatArray:
    """Values of the groups int64 [n, count], and of what follows the last whole group; float32 [n, m]."""
    num_rows, size = values.shape
    num_groups = size // GROUP_SIZE
    rest = values[:, num_groups * GROUP_SIZE :]
    # A view in either case: whole groups are contiguous, and torch can split a dimension of a slice in place.
    body = torch.from_numpy(values)[:, : size - rest.shape[1]].view(num_rows, num_groups, GROUP_SIZE).numpy()
    chosen: FloatArray = body[np.arange(num_rows)[:, None], groups].reshape(num_rows, -1)
    return np.concatenate((chosen, rest), axis=1) if rest.shape[1] else chosen

"""FlashInfer's paged wrapper by its documented contract, in plain torch on the CPU, refusing every use outside of it.

What is documented and checked here: index arrays are int32 and dense; `indptr` begins with 0 and grows; a sequence's
length is `page_size * (pages - 1) + last_page_len`; the NHD cache is `[pages, 2, page_size, kv_heads, head_dim]` and
may be strided (K and V alike) but for the last dimension; causal rows are the last ones of their sequence;
`window_left` counts tokens left of the row. Refused, as the real kernels go wrong there: other heads and dtypes,
sequences shorter than their rows.
"""

import itertools
from collections.abc import Callable

import torch

from common.engine.model.flashinfer_choice import OpenedFlashInfer

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)


class FakePrefillWrapper:
    """`flashinfer.BatchPrefillWithPagedKVCacheWrapper`, counting its calls."""

    def __init__(self) -> None:
        self.num_plans = 0
        self.num_runs = 0
        self.events: list[str] = []

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        indices = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(array.dtype == torch.int32 and array.dim() == 1 and array.is_contiguous() for array in indices)
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        for starts in (qo_indptr.tolist(), paged_kv_indptr.tolist()):
            assert starts[0] == 0
            assert starts == sorted(starts)
        assert len(paged_kv_indices) == int(paged_kv_indptr[-1])
        assert all(1 <= length <= page_size for length in paged_kv_last_page_len.tolist())
        assert num_qo_heads % num_kv_heads == 0
        assert head_dim_qk in HEAD_DIMS
        assert q_data_type in DTYPES
        assert kv_data_type in (None, q_data_type)
        self.num_plans += 1
        self.events.append("plan")
        # Kept as they are, like the buffers on the device: what changes them afterwards changes the result.
        self._indices = indices
        self._shape = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self._causal, self._window_left, self._dtype = causal, window_left, q_data_type
        self._scale = head_dim_qk**-0.5 if sm_scale is None else sm_scale

    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        self.attend(q, *paged_kv_cache.unbind(1), out)
        self.num_runs += 1
        self.events.append("run")
        return out

    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
        """What the kernel does; `keys` and `values` are `[pages, page_size, kv_heads, head_dim]`."""
        num_qo_heads, num_kv_heads, head_dim, page_size = self._shape
        assert q.dtype == keys.dtype == values.dtype == out.dtype == self._dtype
        assert keys.shape[1:] == (page_size, num_kv_heads, head_dim)
        assert keys.stride() == values.stride()
        assert q.stride(-1) == keys.stride(-1) == 1
        assert q.shape == out.shape == (int(self._indices[0][-1]), num_qo_heads, head_dim)
        assert out.is_contiguous()
        rows, pages, indices, last = (array.tolist() for array in self._indices)
        for (begin, end), (first, stop), last_len in zip(
            itertools.pairwise(rows), itertools.pairwise(pages), last, strict=True
        ):
            used = indices[first:stop]
            length = page_size * (stop - first - 1) + last_len
            seen = (side[used].flatten(0, 1)[:length].float() for side in (keys, values))
            out[begin:end] = self._attend(q[begin:end].float(), *seen).to(out.dtype)

    def _attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        group = query.shape[1] // keys.shape[1]
        num_rows, length = len(query), len(keys)
        assert num_rows <= length
        row, column = torch.arange(num_rows)[:, None], torch.arange(length)
        hidden = torch.zeros(num_rows, length, dtype=torch.bool)
        if self._causal:
            hidden |= column > length - num_rows + row
        if self._window_left >= 0:
            hidden |= column + num_rows + self._window_left < length + row
        scores = torch.einsum("qhd,khd->hqk", query, keys.repeat_interleave(group, 1)) * self._scale
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, 1))


class FakeFence:
    """Writes down when it is waited for and marked."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def wait(self) -> None:
        self._events.append("wait")

    def mark(self) -> None:
        self._events.append("mark")


class FakeLibrary:
    """A `FlashInferLibrary` of fakes.

    Args:
        make_wrapper: what `open` gives, or raises.
        lost: what the device says when it is waited for.
    """

    def __init__(
        self, make_wrapper: Callable[[], FakePrefillWrapper] = FakePrefillWrapper, lost: Exception | None = None
    ) -> None:
        self._make_wrapper = make_wrapper
        self._lost = lost
        self.num_opened = 0

    def open(self, device: torch.device) -> OpenedFlashInfer:
        self.num_opened += 1
        wrapper = self._make_wrapper()
        return OpenedFlashInfer(wrapper, FakeFence(wrapper.events))

    def finish(self, device: torch.device) -> None:
        if self._lost is not None:
            raise self._lost

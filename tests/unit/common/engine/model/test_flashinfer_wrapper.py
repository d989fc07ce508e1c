"""Our calls through the wrapper that is installed, on the CPU: only its compiled module is stood in for.

Needs the Python half of flashinfer (no card, no compiler); skipped where it is not installed.
"""

from importlib.util import find_spec

import pytest
import torch

from common.engine.model.attention import TorchPagedAttention
from common.engine.model.flashinfer_choice import BACKEND, OpenedFlashInfer, open_flashinfer
from tests.support.attention_cases import make_case
from tests.support.fake_flashinfer import FakeFence, FakePrefillWrapper
from tests.support.tiny_model import tiny_config

pytestmark = [
    pytest.mark.skipif(find_spec("flashinfer") is None, reason="flashinfer is not installed"),
    pytest.mark.filterwarnings("default"),  # what its packages warn of is not ours
]
CPU = torch.device("cpu")


class Module:
    """FlashInfer's compiled module by the order of its arguments: it hands them to the fake, which computes."""

    def __init__(self) -> None:
        self.plans: list[tuple] = []

    def plan(self, *arguments):
        (_, _, _, query_starts, page_starts, lengths, num_rows, num_seqs, *rest) = arguments
        assert all(array.dtype == torch.int32 for array in (query_starts, page_starts, lengths))
        assert (num_rows, num_seqs) == (int(query_starts[-1]), len(lengths))
        num_heads, num_kv_heads, page_size, uses_graph, head_dim, value_dim, causal, window_left, *_ = rest
        assert head_dim == value_dim
        assert causal
        assert not uses_graph
        self.plans.append((num_heads, num_kv_heads, head_dim, page_size, window_left))
        return [len(self.plans)]

    def paged_run(self, *arguments):
        (_, _, info, query, keys, values, *indices, out, log_sums, mask, layout, window_left) = arguments[:15]
        custom_mask, prefix, soft_cap, scale = (arguments[place] for place in (16, 19, 22, 23))
        assert info == [len(self.plans)]
        assert log_sums is custom_mask is prefix is None
        assert (mask, layout, soft_cap) == (1, 0, 0.0)  # causal, NHD
        *shape, planned_window = self.plans[-1]
        assert window_left == planned_window
        fake = FakePrefillWrapper()
        fake.plan(*indices, *shape, causal=True, sm_scale=scale, window_left=window_left, q_data_type=query.dtype)
        fake.attend(query, keys, values, out)


@pytest.fixture
def module(monkeypatch):
    import flashinfer

    made = Module()
    empty = torch.empty
    monkeypatch.setattr(flashinfer.prefill, "get_batch_prefill_module", lambda backend, *_: made)
    monkeypatch.setattr(flashinfer.prefill, "device_support_pdl", lambda _: False)
    # Without a driver there is no pinned memory.
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options))
    return made


class Library:
    def open(self, device):
        import flashinfer

        workspace = torch.zeros(1 << 20, dtype=torch.uint8, device=device)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=BACKEND)
        return OpenedFlashInfer(wrapper, FakeFence([]))

    def finish(self, device):
        pass


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 20, 4096])
@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (7, 1)])
def test_the_installed_wrapper_takes_our_calls_and_gives_plain_attention(module, dtype, window, heads):
    config = tiny_config(num_heads=heads[0], num_kv_heads=heads[1], head_dim=64, sliding_window=window)
    attention = open_flashinfer(config, dtype, CPU, TorchPagedAttention(config), Library())
    for seed, block_size in enumerate((1, 5, 16)):
        arguments, truth = make_case(config, [(7, 1), (0, 9), (3, 2), (12, 1)], seed, block_size)

        out = attention.attend(*(part.to(dtype) if isinstance(part, torch.Tensor) else part for part in arguments))

        torch.testing.assert_close(out.float(), truth, atol=3e-2, rtol=3e-2)
    assert len(module.plans) == 5  # two of the check

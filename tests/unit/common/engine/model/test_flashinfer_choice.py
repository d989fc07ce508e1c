import importlib.util

import pytest
import torch

from common.engine.model.decoders import cuda_kernels
from common.engine.model.flashinfer_choice import FlashInferUnusable, InstalledFlashInfer
from common.engine.model.kernels import TorchKernels
from common.errors import ConfigError, StartupError
from tests.support.fake_flashinfer import FakeLibrary, FakePrefillWrapper
from tests.support.tiny_model import tiny_config

pytest.importorskip("triton")

CPU = torch.device("cpu")


def choose(library, wanted="auto", dtype=torch.float16, **shape):
    config = tiny_config(**{"num_heads": 6, "num_kv_heads": 2, "head_dim": 64, **shape})
    return cuda_kernels(wanted, TorchKernels(CPU, dtype), config, library)


class RowsAtTheBeginning(FakePrefillWrapper):
    """Masks as if query rows were the first ones of their sequence."""

    def _attend(self, query, keys, values):
        self._causal = False
        hidden = torch.arange(len(keys)) > torch.arange(len(query))[:, None]
        group = query.shape[1] // keys.shape[1]
        scores = torch.einsum("qhd,khd->hqk", query, keys.repeat_interleave(group, 1)) * self._scale
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, 1))


class SeesTheNextToken(FakePrefillWrapper):
    def _attend(self, query, keys, values):
        self._causal = False
        return super()._attend(query, keys, values)


class MixesUpHeads(FakePrefillWrapper):
    """Query head h reads KV head h modulo their number, instead of h divided by the group."""

    def _attend(self, query, keys, values):
        order = torch.arange(query.shape[1]).view(-1, keys.shape[1]).T.flatten()
        out = torch.empty_like(query)
        out[:, order] = super()._attend(query[:, order], keys, values)
        return out


class TakesPagesInTheOrderOfMemory(FakePrefillWrapper):
    def plan(self, qo_indptr, paged_kv_indptr, paged_kv_indices, *rest, **options):
        super().plan(qo_indptr, paged_kv_indptr, paged_kv_indices.sort().values, *rest, **options)


class KeepsItsFirstPlan(FakePrefillWrapper):
    """A pinned buffer that was overwritten too late: the second batch runs with the pages of the first."""

    def plan(self, qo_indptr, paged_kv_indptr, paged_kv_indices, *rest, **options):
        self.first = paged_kv_indices if self.num_plans == 0 else self.first[: len(paged_kv_indices)]
        super().plan(qo_indptr, paged_kv_indptr, self.first, *rest, **options)


class SwapsKeysAndValues(FakePrefillWrapper):
    def run(self, q, paged_kv_cache, *, out):
        return super().run(q, paged_kv_cache.flip(1), out=out)


class WritesNothing(FakePrefillWrapper):
    def run(self, q, paged_kv_cache, *, out):
        return out.fill_(float("nan"))


class WindowOffBy(FakePrefillWrapper):
    def __init__(self, by):
        super().__init__()
        self._by = by

    def plan(self, *arguments, window_left, **options):
        super().plan(*arguments, window_left=window_left + self._by, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 20, 4096])
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (7, 1)])
def test_flashinfer_serves_where_its_answers_are_right(dtype, window, heads):
    kernels, note = choose(FakeLibrary(), dtype=dtype, sliding_window=window, num_heads=heads[0], num_kv_heads=heads[1])

    assert kernels.name == "flashinfer"
    assert note is None


@pytest.mark.parametrize(
    "wrong",
    [
        RowsAtTheBeginning,
        SeesTheNextToken,
        MixesUpHeads,
        TakesPagesInTheOrderOfMemory,
        KeepsItsFirstPlan,
        SwapsKeysAndValues,
        WritesNothing,
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_wrong_answer_and_triton_serves_and_the_reason_is_told(wrong, dtype):
    kernels, note = choose(FakeLibrary(wrong), dtype=dtype)

    assert kernels.name == "triton"
    assert note is not None
    assert "FlashInfer's self-check is off by" in note


@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_window_that_is_off_by_one_token_is_noticed_however_large_the_models_is(by, dtype):
    kernels, _ = choose(FakeLibrary(lambda: WindowOffBy(by)), dtype=dtype, sliding_window=4096)

    assert kernels.name == "triton"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (ImportError("libcudart.so.13: cannot open"), "does not work here: ImportError: libcudart.so.13: cannot open"),
        (
            RuntimeError("ninja exited\n  nvcc not found"),
            "does not work here: RuntimeError: ninja exited nvcc not found",
        ),
        (FlashInferUnusable("flashinfer is not installed"), "flashinfer is not installed"),
        (AssertionError(), "does not work here: AssertionError"),
    ],
)
def test_a_package_that_does_not_start_leaves_triton_and_a_reason_of_one_line(fault, reason):
    def refuse():
        raise fault

    kernels, note = choose(FakeLibrary(refuse))

    assert kernels.name == "triton"
    assert note is not None
    assert note.endswith(reason)
    with pytest.raises(ConfigError, match=r"attention_backend: flashinfer cannot be used: .*; use auto or triton"):
        choose(FakeLibrary(refuse), "flashinfer")


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"dtype": torch.float32}, "FlashInfer does not compute float32"),
        ({"head_dim": 96}, "FlashInfer computes heads of 64, 128, 256, not of 96"),
    ],
)
def test_what_flashinfer_does_not_compute_is_never_tried(shape, reason):
    library = FakeLibrary()

    kernels, note = choose(library, **shape)

    assert (kernels.name, note, library.num_opened) == ("triton", reason, 0)
    with pytest.raises(ConfigError, match=reason):
        choose(library, "flashinfer", **shape)


def test_a_wrong_answer_stops_the_start_of_who_asked_for_flashinfer():
    with pytest.raises(ConfigError, match="self-check is off by"):
        choose(FakeLibrary(SwapsKeysAndValues), "flashinfer")


@pytest.mark.parametrize("wanted", ["auto", "flashinfer"])
def test_a_device_that_the_check_broke_stops_the_start_and_the_way_out_is_named(wanted):
    library = FakeLibrary(lost=RuntimeError("CUDA error: an illegal memory access was encountered"))

    with pytest.raises(StartupError, match=r"illegal memory access.*is lost.*attention_backend: triton"):
        choose(library, wanted)


def test_who_asks_for_triton_gets_it_without_a_look_at_flashinfer():
    library = FakeLibrary()

    kernels, note = choose(library, "triton")

    assert (kernels.name, note, library.num_opened) == ("triton", None, 0)


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is not None, reason="flashinfer is installed")
def test_an_environment_without_the_package_says_so():
    with pytest.raises(FlashInferUnusable, match="flashinfer is not installed"):
        InstalledFlashInfer().open(CPU)

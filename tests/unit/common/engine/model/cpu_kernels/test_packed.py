import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.model.cpu_kernels.library import available
from common.engine.model.cpu_kernels.packed import PackedFormat, PackedLinear, formats_for
from common.engine.model.cpu_kernels.threads import Threads
from common.errors import StartupError

pytestmark = pytest.mark.skipif(not available(), reason="the kernels cannot be built here")

FLOAT32, INT8 = (PackedFormat.FLOAT32,), formats_for("int8") if available() else ()
# bfloat16 has one format for vectors and, where the machine has one, another for its tile unit.
BFLOAT16 = [PackedFormat.BFLOAT16, *(formats_for("bfloat16") if available() else ())]
FORMATS = [*FLOAT32, PackedFormat.Q8, *BFLOAT16]


@pytest.fixture(scope="module")
def threads() -> Threads:
    return Threads(2)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stored(linear: PackedLinear) -> torch.Tensor:
    return torch.stack([linear.row(index) for index in range(linear.out_features)])


def on_grid(rows: int, columns: int, levels: int, minimum: bool, seed: int = 0) -> torch.Tensor:
    """Weights as GGUF's Q4_1 (16 levels, minimum) or Q8_0 (symmetric) store them: groups of 32 with half scales."""
    generator = torch.Generator().manual_seed(seed)
    groups = rows * columns // 32
    q = torch.randint(0, levels, (groups, 32), generator=generator).float()
    q[:, 0], q[:, 1] = 0, levels - 1  # each group spans its range, as quantisers make them
    scale = (torch.rand(groups, 1, generator=generator) * 0.01 + 1e-4).half().float()
    offset = torch.randn(groups, 1, generator=generator).mul(0.1).half().float() if minimum else -scale * (levels // 2)
    return (q * scale + offset).view(rows, columns)


@settings(max_examples=25, deadline=None)
@given(
    m=st.integers(1, 70),
    n=st.integers(1, 150),
    groups=st.integers(1, 14),
    format_=st.sampled_from(FORMATS),
    has_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_packed_map_is_the_map_by_its_stored_weights(
    threads: Threads, m: int, n: int, groups: int, format_: PackedFormat, has_bias: bool, seed: int
) -> None:
    x, weight = random(m, groups * 32, seed=seed), random(n, groups * 32, seed=seed + 1)
    bias = random(n, seed=seed + 2) if has_bias else None
    linear = PackedLinear(weight, bias, (format_,), threads)
    kept = stored(linear)
    assert (kept - weight).abs().max() <= (0.0 if format_ is PackedFormat.FLOAT32 else 0.03)
    # The tile unit sees activations rounded to bfloat16, the vector unit all of them.
    seen = x.to(torch.bfloat16) if format_ is PackedFormat.BFLOAT16_TILES else x
    exact = torch.nn.functional.linear(seen.double(), kept.double(), None if bias is None else bias.double())
    torch.testing.assert_close(linear(x).double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("format_", FORMATS)
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_number_of_threads(format_: PackedFormat) -> None:
    x, weight = random(61, 224), random(99, 224, seed=1)
    linears = [PackedLinear(weight, None, (format_,), Threads(n)) for n in (1, 3)]
    whole = linears[0](x)
    for size in (1, 2, 3, 5, 9, 14, 15, 31, 61):
        for linear in linears:
            assert torch.equal(linear(x[:size]), whole[:size])


def test_paired_matrices_gate_one_half_by_the_other(threads: Threads) -> None:
    x, weight, bias = random(20, 64), random(2 * 50, 64, seed=1), random(100, seed=2)
    gate, up = torch.nn.functional.linear(x, weight, bias).chunk(2, dim=-1)
    linear = PackedLinear(weight, bias, FLOAT32, threads, paired=True)
    torch.testing.assert_close(linear(x), torch.nn.functional.silu(gate) * up, rtol=1e-4, atol=1e-4)


def test_int8_keeps_four_bit_groups_in_four_bits_without_loss(threads: Threads) -> None:
    weight = on_grid(40, 96, levels=16, minimum=True)
    linear = PackedLinear(weight, None, INT8, threads)
    assert linear.format is PackedFormat.Q4
    assert torch.equal(stored(linear), weight)


def test_int8_keeps_symmetric_eight_bit_groups_without_loss(threads: Threads) -> None:
    weight = on_grid(40, 96, levels=255, minimum=False)
    linear = PackedLinear(weight, None, INT8, threads)
    assert linear.format is PackedFormat.Q8_SYMMETRIC
    assert torch.equal(stored(linear), weight)


def test_exactly_stored_weights_give_the_bits_of_float32(threads: Threads) -> None:
    weight, x = on_grid(70, 128, levels=16, minimum=True), random(17, 128)
    small, full = (PackedLinear(weight, None, formats, threads) for formats in (INT8, FLOAT32))
    assert small.num_bytes < full.num_bytes / 6
    assert torch.equal(small(x), full(x))


def test_groups_of_zeros_and_of_one_value_are_kept(threads: Threads) -> None:
    weight = torch.cat([torch.zeros(3, 32), torch.full((2, 32), 0.25), random(2, 32)])
    kept = stored(PackedLinear(weight, None, INT8, threads))
    assert torch.equal(kept[:5], weight[:5])


@pytest.mark.parametrize("format_", BFLOAT16)
def test_bfloat16_rounds_as_torch_does(threads: Threads, format_: PackedFormat) -> None:
    weight = random(33, 64)
    kept = stored(PackedLinear(weight, None, (format_,), threads))
    assert torch.equal(kept, weight.to(torch.bfloat16).float())


def test_an_empty_batch_gives_an_empty_result(threads: Threads) -> None:
    assert PackedLinear(random(40, 32), None, FLOAT32, threads)(torch.empty(0, 32)).shape == (0, 40)


def test_widths_that_are_no_multiple_of_a_group_are_refused(threads: Threads) -> None:
    with pytest.raises(StartupError, match="48 inputs are not a multiple of 32"):
        PackedLinear(random(8, 48), None, INT8, threads)

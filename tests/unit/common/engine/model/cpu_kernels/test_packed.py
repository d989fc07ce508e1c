import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.model.cpu_kernels.library import available, load_library
from common.engine.model.cpu_kernels.packed import PackedFormat, PackedLinear
from common.engine.model.cpu_kernels.threads import Threads
from common.errors import StartupError

pytestmark = pytest.mark.skipif(not available(), reason="the kernels cannot be built here")

HAS_TILES = available() and bool(load_library().pd_has_tiles())
FLOAT32 = (PackedFormat.FLOAT32,)
# bfloat16 and int8 have formats for vectors and, where the machine has one, others for its tile unit.
BFLOAT16 = [PackedFormat.BFLOAT16, *([PackedFormat.BFLOAT16_TILES] if HAS_TILES else [])]
INT8_BY_VECTORS = (PackedFormat.Q4, PackedFormat.Q8_SYMMETRIC, PackedFormat.Q8)
INT8_ON_TILES = (PackedFormat.Q4_TILES, PackedFormat.Q8_SYMMETRIC_TILES, PackedFormat.Q8_TILES)
INT8 = [INT8_BY_VECTORS, *([INT8_ON_TILES] if HAS_TILES else [])]
COARSENESS = {PackedFormat.FLOAT32: 0.0, PackedFormat.Q4: 0.3, PackedFormat.Q4_TILES: 0.3}
FORMATS = [*FLOAT32, *BFLOAT16, *(one for formats in INT8 for one in formats)]
needs_tiles = pytest.mark.skipif(not HAS_TILES, reason="this machine has no tile unit")


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


def as_seen(x: torch.Tensor, format_: PackedFormat) -> torch.Tensor:
    """Activations as a product takes them: on the tile unit one or two bfloat16 of each, by vectors all of it."""
    if not format_.name.endswith("_TILES"):
        return x
    high = x.to(torch.bfloat16).float()
    return high if format_ is PackedFormat.BFLOAT16_TILES else high + (x - high).to(torch.bfloat16).float()


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
    assert (kept - weight).abs().max() <= COARSENESS.get(format_, 0.03)
    exact = torch.nn.functional.linear(
        as_seen(x, format_).double(), kept.double(), None if bias is None else bias.double()
    )
    torch.testing.assert_close(linear(x).double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("format_", FORMATS)
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_number_of_threads(format_: PackedFormat) -> None:
    x, weight = random(61, 224) * torch.logspace(-3, 3, 224), random(99, 224, seed=1)
    linears = [PackedLinear(weight, None, (format_,), Threads(n)) for n in (1, 3)]
    whole = linears[0](x)
    for size in (1, 2, 3, 4, 5, 8, 9, 14, 15, 16, 17, 31, 33, 49, 61):
        for linear in linears:
            assert torch.equal(linear(x[:size]), whole[:size])


@needs_tiles
def test_a_row_of_tiny_numbers_has_the_same_bits_in_any_batch(threads: Threads) -> None:
    x, linear = random(20, 96) * 2e-38, PackedLinear(on_grid(40, 96, 16, minimum=True), None, INT8_ON_TILES, threads)
    whole = linear(x)
    for size in (1, 4, 6, 17):
        assert torch.equal(linear(x[:size]), whole[:size])


@pytest.mark.parametrize("formats", [FLOAT32, *((formats[2],) for formats in INT8)])
def test_paired_matrices_gate_one_half_by_the_other(threads: Threads, formats: tuple[PackedFormat, ...]) -> None:
    x, weight, bias = random(20, 64), on_grid(2 * 50, 64, levels=255, minimum=False), random(100, seed=2)
    gate, up = torch.nn.functional.linear(x, weight, bias).chunk(2, dim=-1)
    linear = PackedLinear(weight, bias, formats, threads, paired=True)
    torch.testing.assert_close(linear(x), torch.nn.functional.silu(gate) * up, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("formats", INT8)
def test_int8_keeps_four_bit_groups_in_four_bits_without_loss(
    threads: Threads, formats: tuple[PackedFormat, ...]
) -> None:
    weight = on_grid(40, 96, levels=16, minimum=True)
    linear = PackedLinear(weight, None, formats, threads)
    assert linear.format is formats[0]
    assert torch.equal(stored(linear), weight)


@pytest.mark.parametrize("formats", INT8)
def test_int8_keeps_symmetric_eight_bit_groups_without_loss(
    threads: Threads, formats: tuple[PackedFormat, ...]
) -> None:
    weight = on_grid(40, 96, levels=255, minimum=False)
    linear = PackedLinear(weight, None, formats, threads)
    assert linear.format is formats[1]
    assert torch.equal(stored(linear), weight)


def test_exactly_stored_weights_give_the_bits_of_float32_by_vectors(threads: Threads) -> None:
    weight, x = on_grid(70, 128, levels=16, minimum=True), random(17, 128)
    small, full = (PackedLinear(weight, None, formats, threads) for formats in (INT8_BY_VECTORS, FLOAT32))
    assert small.num_bytes < full.num_bytes / 6
    assert torch.equal(small(x), full(x))


@needs_tiles
@settings(max_examples=40, deadline=None)
@given(
    m=st.integers(1, 70),
    n=st.integers(1, 100),
    groups=st.integers(1, 20),
    levels=st.sampled_from([16, 255]),
    exponent=st.integers(-30, 30),
    offset=st.sampled_from([0.0, 1.0, 300.0]),
    seed=st.integers(0, 1000),
)
def test_tiles_are_as_near_to_the_exact_product_of_what_they_see_as_float32(
    threads: Threads, m: int, n: int, groups: int, levels: int, exponent: int, offset: float, seed: int
) -> None:
    weight = on_grid(n, groups * 32, levels=levels, minimum=levels == 16, seed=seed)
    x = (random(m, groups * 32, seed=seed) + offset) * 2.0**exponent
    x[:, ::7] *= 1e-6  # activations of one row differ by orders of magnitude
    x[0, ::3] = 0
    linear = PackedLinear(weight, None, INT8_ON_TILES, threads)
    seen = as_seen(x, linear.format).double()
    assert ((seen - x).abs() <= 2.0**-17 * x.abs() + 1e-37).all()
    exact = torch.nn.functional.linear(seen, stored(linear).double())
    bound = torch.nn.functional.linear(x.double().abs(), stored(linear).double().abs())
    # Float32's rounding is 6e-8 of what is added up; a level of four bits is added up to 32 times as large as it is.
    assert ((linear(x).double() - exact).abs() <= 4e-6 * bound + 1e-37).all()


@needs_tiles
def test_on_tiles_an_activation_counts_to_17_bits(threads: Threads) -> None:
    # Rows of a unit matrix pick one activation each: what comes out is what of it went in.
    weight = torch.eye(32)
    linear = PackedLinear(weight, None, (PackedFormat.Q8_SYMMETRIC_TILES,), threads)
    scale = linear.row(0)[0].item() / 127
    integers = torch.randint(-(2**24), 2**24, (64, 32), generator=torch.Generator().manual_seed(0)).float()
    exponents = torch.randint(-80, 60, (64, 32), generator=torch.Generator().manual_seed(1))
    x = torch.ldexp(integers, exponents)
    seen = as_seen(x, linear.format).double()
    assert ((seen - x).abs() <= 2.0**-17 * x.abs()).all()
    expected = (seen * 127).float().double() * scale  # one rounding each: of level times activation, and of scale
    torch.testing.assert_close(linear(x), expected.float(), rtol=2.0**-22, atol=0)


@needs_tiles
def test_on_tiles_activations_at_the_ends_of_the_range_stay_what_they_are(threads: Threads) -> None:
    linear = PackedLinear(torch.eye(32), None, (PackedFormat.Q8_SYMMETRIC_TILES,), threads)
    x = torch.zeros(6, 32)
    x[0, 0], x[1, 1], x[2, 2], x[3, 3] = 2.0**120, -(2.0**120), 1e-42, float("inf")
    out = linear(x)
    unit = linear.row(0)[0]
    assert out[0, 0] == 2.0**120 * unit
    assert out[1, 1] == -(2.0**120) * unit
    assert out[2].abs().max() < 1e-37  # what is no normal number is zero to the unit
    assert not out[3, 3].isfinite()
    assert torch.equal(out[4:], torch.zeros(2, 32))


@pytest.mark.parametrize("formats", INT8)
def test_groups_of_zeros_and_of_one_value_are_kept(threads: Threads, formats: tuple[PackedFormat, ...]) -> None:
    weight = torch.cat([torch.zeros(3, 32), torch.full((2, 32), 0.25), random(2, 32)])
    kept = stored(PackedLinear(weight, None, formats, threads))
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
        PackedLinear(random(8, 48), None, INT8_BY_VECTORS, threads)

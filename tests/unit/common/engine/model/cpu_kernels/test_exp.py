import zlib

import numpy as np
import numpy.typing as npt
import pytest

from common.engine.model.cpu_kernels.library import available, load_library
from common.engine.sampling.cpu_kernels.library import SamplingKernels

pytestmark = pytest.mark.skipif(not available(), reason="the kernels cannot be built here")

SWEEP: npt.NDArray[np.float32] = np.linspace(-87.0, 0.0, 100_003, dtype=np.float32)


def decoders(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    out = np.empty_like(x)
    load_library().pd_exp(x.ctypes.data, x.size, out.ctypes.data)
    return out


def samplers(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return SamplingKernels().exp(x)


def test_decoder_and_sampler_compute_the_same_exponential() -> None:
    assert np.array_equal(decoders(SWEEP), samplers(SWEEP))


def test_the_exponential_is_less_than_two_units_off() -> None:
    exact = np.exp(SWEEP.astype(np.float64))
    assert (np.abs(decoders(SWEEP) - exact) / np.spacing(exact.astype(np.float32))).max() < 2


def test_the_exponential_keeps_its_bits_on_every_machine_and_in_every_release() -> None:
    # Logits and seeded draws are promised bit for bit; this is what they are made of.
    assert zlib.crc32(decoders(SWEEP).tobytes()) == 1935360002


def test_beyond_single_precision_the_sampler_has_zero_and_the_decoder_its_bound() -> None:
    low = np.array([-88.0, -1e4, -np.inf], dtype=np.float32)
    assert samplers(low).tolist() == [0.0, 0.0, 0.0]
    assert np.array_equal(decoders(low), decoders(np.full(3, -87.33, dtype=np.float32)))
    assert np.isnan(samplers(np.array([np.nan], dtype=np.float32)))

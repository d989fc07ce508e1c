"""Seeds of choices, and noise that is a function of (seed, output position, id).

Owns: every random bit of sampling. There is no generator state: a row's noise does not depend on its batch, its engine
or what was drawn before. Only integer arithmetic modulo 2^64 and one double-precision logarithm rounded to single, so
numpy, torch on CPU and torch on CUDA agree bit for bit. Source of the mixer: murmur3's 64-bit finaliser; of the
counter: SplitMix64 (Steele, Lea, Flood 2014), started from seed and position.
"""

import secrets

import numpy as np
import numpy.typing as npt
import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST_FACTOR = 0xFF51AFD7ED558CCD
_SECOND_FACTOR = 0xC4CEB9FE1A85EC53
_SHIFT = 33
_UNIFORM_SHIFT = 11
_UNIFORM_STEP = 2.0**-53
Keys = npt.NDArray[np.uint64]


def mix64(value: int) -> int:
    """A bijection of 64-bit integers whose output bits each depend on all input bits."""
    value &= _MASK
    value = ((value ^ (value >> _SHIFT)) * _FIRST_FACTOR) & _MASK
    value = ((value ^ (value >> _SHIFT)) * _SECOND_FACTOR) & _MASK
    return value ^ (value >> _SHIFT)


def seed_for_choice(seed: int | None, index: int = 0) -> int:
    """The 64-bit seed of choice `index` of a request: reproducible and different per choice; None draws one."""
    if seed is None:
        return secrets.randbits(64)
    return mix64(seed + index * _GOLDEN)


def row_keys(seed_keys: Keys, positions: npt.NDArray[np.int64]) -> Keys:
    """One key per row, uint64 [R].

    Args:
        seed_keys: `mix64` of each row's seed, uint64 [R].
        positions: output position of the token to draw, int64 [R].
    """
    return _mixed(seed_keys + positions.astype(np.uint64) * np.uint64(_GOLDEN))


def exponential_noise(keys: Keys, ids: Keys) -> npt.NDArray[np.float32]:
    """Independent Exp(1) draws on the host, a pure function of (key, id).

    Args:
        keys: uint64 [R], from `row_keys`.
        ids: uint64 [N] or [R, N].

    Returns:
        float32 [R, N], positive.
    """
    bits = _mixed(keys[:, None] + (ids + np.uint64(1)) * np.uint64(_GOLDEN))
    uniform = (bits >> np.uint64(_UNIFORM_SHIFT)).astype(np.float64)
    uniform += 0.5
    uniform *= _UNIFORM_STEP
    np.log(uniform, out=uniform)
    return np.negative(uniform, out=uniform).astype(np.float32)


def exponential_noise_on_device(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """`exponential_noise` in torch, the same bits: keys int64 [R], ids int64 [N] or [R, N] -> float32 [R, N]."""
    bits = _mixed_tensor(keys.unsqueeze(1) + (ids + 1) * signed64(_GOLDEN))
    uniform = (_shifted_right(bits, _UNIFORM_SHIFT).to(torch.float64) + 0.5) * _UNIFORM_STEP
    return uniform.log_().neg_().to(torch.float32)


def signed64(value: int) -> int:
    """The same 64 bits as a signed integer, which is what an int64 tensor holds."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _mixed(value: Keys) -> Keys:
    """`mix64` of each element, in place."""
    value ^= value >> np.uint64(_SHIFT)
    value *= np.uint64(_FIRST_FACTOR)
    value ^= value >> np.uint64(_SHIFT)
    value *= np.uint64(_SECOND_FACTOR)
    value ^= value >> np.uint64(_SHIFT)
    return value


def _mixed_tensor(value: torch.Tensor) -> torch.Tensor:
    """`mix64` of each element of an int64 tensor; multiplication wraps."""
    value = (value ^ _shifted_right(value, _SHIFT)) * signed64(_FIRST_FACTOR)
    value = (value ^ _shifted_right(value, _SHIFT)) * signed64(_SECOND_FACTOR)
    return value ^ _shifted_right(value, _SHIFT)


def _shifted_right(value: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift of int64; torch's own keeps the sign."""
    return (value >> count) & ((1 << (64 - count)) - 1)

"""Seeds of choices, and noise that is a function of (seed, output position, id).

Owns: every random bit of sampling. There is no generator state: a row's noise does not depend on its batch, its engine
or what was drawn before. Only integer arithmetic modulo 2^64 and one double-precision logarithm rounded to single, so
CPU and CUDA agree bit for bit. Source of the mixer: murmur3's 64-bit finaliser; of the counter: SplitMix64 (Steele,
Lea, Flood 2014), with the seed and the position as its starting point.
"""

import secrets

import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST_FACTOR = 0xFF51AFD7ED558CCD
_SECOND_FACTOR = 0xC4CEB9FE1A85EC53
_UNIFORM_BITS = 53


def mix64(value: int) -> int:
    """A bijection of 64-bit integers whose output bits each depend on all input bits."""
    value &= _MASK
    value = ((value ^ (value >> 33)) * _FIRST_FACTOR) & _MASK
    value = ((value ^ (value >> 33)) * _SECOND_FACTOR) & _MASK
    return value ^ (value >> 33)


def seed_for_choice(seed: int | None, index: int = 0) -> int:
    """The 64-bit seed of choice `index` of a request: reproducible and different per choice; None draws one."""
    if seed is None:
        return secrets.randbits(64)
    return mix64(seed + index * _GOLDEN)


def signed64(value: int) -> int:
    """The same 64 bits as a signed integer, which is what an int64 tensor holds."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def row_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One key per row for `exponential_noise`.

    Args:
        seeds: int64 [R].
        positions: int64 [R], output position of the token to draw.

    Returns:
        int64 [R].
    """
    return _mix(_mix(seeds) + positions * signed64(_GOLDEN))


def exponential_noise(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Independent Exp(1) draws, a pure function of (key, id).

    Args:
        keys: int64 [R], from `row_keys`.
        ids: int64 [N] or [R, N].

    Returns:
        float32 [R, N], positive.
    """
    bits = _mix(keys.unsqueeze(1) + (ids + 1) * signed64(_GOLDEN))
    uniform = (_shift_right(bits, 64 - _UNIFORM_BITS).to(torch.float64) + 0.5) * 2.0**-_UNIFORM_BITS
    return uniform.log_().neg_().to(torch.float32)


def _shift_right(value: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift of int64; torch's own keeps the sign."""
    return (value >> count) & ((1 << (64 - count)) - 1)


def _mix(value: torch.Tensor) -> torch.Tensor:
    """`mix64` of each element of an int64 tensor; multiplication wraps."""
    value = (value ^ _shift_right(value, 33)) * signed64(_FIRST_FACTOR)
    value = (value ^ _shift_right(value, 33)) * signed64(_SECOND_FACTOR)
    return value ^ _shift_right(value, 33)

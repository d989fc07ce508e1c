"""Seeds of choices, and noise that is a function of (seed, output position, id).

Owns: every random bit of sampling. Does not know batches.
"""

import secrets

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix64(value: int) -> int:
    """A bijection of 64-bit integers whose output bits each depend on all input bits (murmur3's finaliser)."""
    value &= _MASK
    value = ((value ^ (value >> 33)) * 0xFF51AFD7ED558CCD) & _MASK
    value = ((value ^ (value >> 33)) * 0xC4CEB9FE1A85EC53) & _MASK
    return value ^ (value >> 33)


def seed_for_choice(seed: int | None, index: int = 0) -> int:
    """The 64-bit seed of choice `index` of a request: reproducible and different per choice; None draws one."""
    if seed is None:
        return secrets.randbits(64)
    return mix64(seed + index * _GOLDEN)

"""Rotary position embedding in the rotate-half layout of Hugging Face checkpoints.

Owns: frequencies and the rotation. Source: Su et al. 2021 (RoFormer); llama3 scaling as HF configs define it.
"""

import math
from dataclasses import dataclass

import torch

from common.engine.model.config import Llama3RopeScaling, ModelConfig


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of a batch's positions, computed once per forward; each `[num_tokens, 1, head_dim / 2]`."""

    cos: torch.Tensor
    sin: torch.Tensor


class RotaryEmbedding:
    """Turns positions into rotations. State: `head_dim / 2` float32 frequencies on `device`."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._frequencies = rotary_frequencies(config).to(device)

    @property
    def frequencies(self) -> torch.Tensor:
        """float32 `[head_dim / 2]`, radians per position."""
        return self._frequencies

    def rotation(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
        """Rotation of each position; angles in float32, result in `dtype`.

        Args:
            positions: int64 `[num_tokens]`.
            dtype: of the result.
        """
        angles = positions.to(torch.float32)[:, None] * self._frequencies[None, :]
        return Rotation(angles.cos().to(dtype)[:, None, :], angles.sin().to(dtype)[:, None, :])


def rotary_frequencies(config: ModelConfig) -> torch.Tensor:
    """Radians per position, float32 `[head_dim / 2]` on the CPU, every scaling applied."""
    rope = config.rope
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).to(torch.float32) / config.head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.llama3 is not None:
        frequencies = _stretch_llama3(frequencies, rope.llama3)
    if rope.frequency_divisors:
        frequencies = frequencies / torch.tensor(rope.frequency_divisors, dtype=torch.float32)
    return frequencies / rope.linear_factor


def _stretch_llama3(frequencies: torch.Tensor, scaling: Llama3RopeScaling) -> torch.Tensor:
    """Divide slow frequencies by `factor`, keep fast ones, and blend those between.

    wavelength:  short ----- original/high ----- original/low ----- long
    frequency:   kept        blended                       divided by factor
    """
    wavelengths = 2 * math.pi / frequencies
    share_kept = (scaling.original_max_positions / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    share_kept = share_kept.clamp(0.0, 1.0)
    return (1 - share_kept) * frequencies / scaling.factor + share_kept * frequencies


def rotate(heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate every head of every token.

    Args:
        heads: `[num_tokens, num_heads, head_dim]`; not changed.
        rotation: of the same tokens.

    Returns:
        A new tensor like `heads`.
    """
    first, second = heads.chunk(2, dim=-1)
    return torch.cat(
        (first * rotation.cos - second * rotation.sin, second * rotation.cos + first * rotation.sin), dim=-1
    )

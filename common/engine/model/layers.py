"""The small parts a decoder is made of: linear maps and RMS norm.

Owns: the `Linear` port and its torch implementations. A kernel package provides others behind the same port
(`kernels.KernelBackend`). Does not know attention or layers' order.
"""

from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 -- torch's own name for it


class Linear(Protocol):
    """A fixed affine map `x @ weight.T + bias`; the implementation owns its weight's layout."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[num_tokens, in_features]` to `[num_tokens, out_features]` of x's dtype; `x` is not changed."""
        ...


class TorchLinear:
    """`torch.nn.functional.linear` over a `[out_features, in_features]` weight."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[num_tokens, in_features]` to `[num_tokens, out_features]`."""
        return F.linear(x, self._weight, self._bias)


class Int8Linear:
    """Weight-only int8 with one float32 scale per output channel and group of inputs; computes in x's dtype.

    The plain-torch form of `dtype: int8`: right on any device; saves memory, not time (weights are widened each call).

    Args:
        weight: float32 `[out_features, in_features]`, quantised here.
        bias: `[out_features]` or None.
        group_size: inputs that share a scale; the last group may be shorter.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, group_size: int = 32) -> None:
        out_features, in_features = weight.shape
        self._in_features = in_features
        padding = -in_features % group_size
        groups = F.pad(weight.to(torch.float32), (0, padding)).view(out_features, -1, group_size)
        self._scales = (groups.abs().amax(dim=-1, keepdim=True) / 127.0).clamp_min(1e-30)
        self._quantised = (groups / self._scales).round().to(torch.int8)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[num_tokens, in_features]` to `[num_tokens, out_features]`."""
        return F.linear(x, self.dequantised().to(x.dtype), self._bias)

    def dequantised(self) -> torch.Tensor:
        """The weight that is really used, float32 `[out_features, in_features]`."""
        return (self._quantised * self._scales).flatten(1)[:, : self._in_features]


class RmsNorm:
    """Root-mean-square norm over the last dimension, statistics in float32.

    Source: Zhang and Sennrich 2019.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise `[..., size]`; a new tensor of the same dtype."""
        if x.dtype == torch.float32:
            return F.rms_norm(x, self._weight.shape, self._weight, self._eps)
        # Half precision: round to x's dtype before the weight, as the checkpoints were trained.
        return self._weight * F.rms_norm(x.to(torch.float32), self._weight.shape, None, self._eps).to(x.dtype)

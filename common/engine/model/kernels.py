"""Which implementation computes the linear maps and attention: the `KernelBackend` port and the torch one.

Owns: the choice. A compiled backend implements the same port; nothing else of the decoder changes.
"""

from typing import Protocol

import torch

from common.engine.model.attention import Attention, TorchPagedAttention
from common.engine.model.config import ModelConfig
from common.engine.model.layers import Int8Linear, Linear, TorchLinear


class KernelBackend(Protocol):
    """Makes the parts of a decoder that have more than one implementation."""

    @property
    def name(self) -> str:
        """What logs call it."""
        ...

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """A map by `weight`, which the backend may re-lay out, convert or quantise.

        Args:
            weight: float `[out_features, in_features]` on the CPU, as read from the file.
            bias: float `[out_features]` or None.
        """
        ...

    def attention(self, config: ModelConfig) -> Attention:
        """Attention for a decoder of this shape."""
        ...


class TorchKernels:
    """Plain torch on any device.

    Args:
        device: where weights go.
        dtype: of weights and computation (of activations when `int8`).
        int8: keep weights of linear maps as int8.
    """

    name = "torch"

    def __init__(self, device: torch.device, dtype: torch.dtype, *, int8: bool = False) -> None:
        self._device = device
        self._dtype = dtype
        self._int8 = int8

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """`TorchLinear`, or `Int8Linear` for int8."""
        placed_bias = None if bias is None else bias.to(self._device, self._dtype)
        if self._int8:
            return Int8Linear(weight.to(self._device), placed_bias)
        return TorchLinear(weight.to(self._device, self._dtype), placed_bias)

    def attention(self, config: ModelConfig) -> Attention:
        """`TorchPagedAttention`."""
        return TorchPagedAttention(config)


class TritonKernels:
    """Torch's matrix products (cuBLAS) and our paged attention; CUDA only.

    Args:
        linear_maps: makes the linear maps, and says where and in what.
    """

    name = "triton"

    def __init__(self, linear_maps: TorchKernels) -> None:
        self._linear_maps = linear_maps

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """As torch makes it."""
        return self._linear_maps.linear(weight, bias)

    def attention(self, config: ModelConfig) -> Attention:
        """`TritonPagedAttention`; Triton is imported here, so that a CPU engine never loads it."""
        from common.engine.model.triton_attention import TritonPagedAttention

        return TritonPagedAttention(config)

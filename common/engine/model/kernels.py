"""Which implementation computes the linear maps and attention: the `KernelBackend` port, plain torch and CUDA's.

Owns: the parts behind one name. A compiled backend implements the same port; nothing else of the decoder changes.
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

    Attributes:
        device: where weights go.
        dtype: of weights and computation (of activations when `int8`).

    Args:
        device: as above.
        dtype: as above.
        int8: keep weights of linear maps as int8.
    """

    name = "torch"

    def __init__(self, device: torch.device, dtype: torch.dtype, *, int8: bool = False) -> None:
        self.device = device
        self.dtype = dtype
        self._int8 = int8

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """`TorchLinear`, or `Int8Linear` for int8."""
        placed_bias = None if bias is None else bias.to(self.device, self.dtype)
        if self._int8:
            return Int8Linear(weight.to(self.device), placed_bias)
        return TorchLinear(weight.to(self.device, self.dtype), placed_bias)

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


class FlashInferKernels:
    """Torch's matrix products (cuBLAS) and FlashInfer's paged attention; CUDA only.

    Args:
        linear_maps: makes the linear maps, and says where and in what.
        attention: made and checked for the one model these kernels are for.
    """

    name = "flashinfer"

    def __init__(self, linear_maps: TorchKernels, attention: Attention) -> None:
        self._linear_maps = linear_maps
        self._attention = attention

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """As torch makes it."""
        return self._linear_maps.linear(weight, bias)

    def attention(self, config: ModelConfig) -> Attention:  # noqa: ARG002 -- the port's signature
        """That of the model."""
        return self._attention

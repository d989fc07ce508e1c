"""Who computes a model's forward: compiled kernels on the CPU, FlashInfer or Triton on CUDA, plain torch everywhere.

Owns: that choice and the dtypes. Does not know files.
"""

from dataclasses import dataclass
from importlib.util import find_spec

import torch

from common.engine.model.config import ModelConfig
from common.engine.model.cpu_kernels.build import CannotBuild
from common.engine.model.cpu_kernels.decoder import assemble_cpu, unsupported_reason
from common.engine.model.cpu_kernels.packed import WeightDtype
from common.engine.model.flashinfer_choice import (
    FlashInferLibrary,
    FlashInferUnusable,
    InstalledFlashInfer,
    open_flashinfer,
)
from common.engine.model.kernels import FlashInferKernels, KernelBackend, TorchKernels, TritonKernels
from common.engine.model.llama import assemble
from common.engine.model.loaded import PlacedDecoder
from common.engine.model.weights import WeightSource
from common.errors import ConfigError, StartupError

# int8 is weight-only: activations and the KV cache stay float32.
_ACTIVATION_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.float32,
}
_COMPILED_DTYPES: dict[str, WeightDtype] = {"float32": "float32", "bfloat16": "bfloat16", "int8": "int8"}
_CUDA_KERNELS = ("flashinfer", "triton")
_KERNELS = ("auto", "cpu", *_CUDA_KERNELS, "torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenDecoder:
    """A decoder and how it was chosen; fields as in `LoadedModel`."""

    model: PlacedDecoder
    tensors_fingerprint: str
    kernels: str
    note: str | None = None


def make_decoder(
    config: ModelConfig, weights: WeightSource, *, kernels: str, dtype: str, device: torch.device, num_threads: int
) -> ChosenDecoder:
    """Build the decoder of a model.

    Args:
        config: its shape.
        weights: read tensor by tensor.
        kernels: `auto`, `cpu`, `flashinfer`, `triton` or `torch`.
        dtype: float32, bfloat16, float16 or int8.
        device: where it runs.
        num_threads: CPU threads of the forward; 0 leaves the choice to the kernels.

    Raises:
        StartupError: an unknown name, weights that do not fit, or kernels asked for by name that cannot be
            (`ConfigError` for those that a config asks for).
    """
    if dtype not in _ACTIVATION_DTYPES:
        raise StartupError(f"dtype {dtype} is not supported; supported: {', '.join(_ACTIVATION_DTYPES)}")
    if kernels not in _KERNELS:
        raise StartupError(f"kernels {kernels} are unknown; use one of {', '.join(_KERNELS)}")
    if kernels in _CUDA_KERNELS and device.type != "cuda":
        raise ConfigError(f"attention_backend: {kernels} runs on cuda, not on {device}; use auto")
    note = None
    if kernels == "cpu" or (kernels == "auto" and device.type == "cpu"):
        note = _why_not_compiled(config, dtype, device)
        if note is None:
            try:
                model, fingerprint = assemble_cpu(
                    config, weights, weight_dtype=_COMPILED_DTYPES[dtype], num_threads=num_threads
                )
                # torch's threads spin for milliseconds after each parallel region, beside the kernels' own.
                torch.set_num_threads(1)
                return ChosenDecoder(model=model, tensors_fingerprint=fingerprint, kernels="cpu")
            except CannotBuild as error:
                note = str(error)
        if kernels == "cpu":
            raise StartupError(f"kernels cpu: {note}")
    if num_threads and device.type == "cpu":
        torch.set_num_threads(num_threads)
    activations = _ACTIVATION_DTYPES[dtype]
    plain = TorchKernels(device, activations, int8=dtype == "int8")
    backend: KernelBackend = plain
    if device.type == "cuda" and kernels != "torch":
        backend, note = cuda_kernels(kernels, plain, config, InstalledFlashInfer())
    assembled = assemble(config, weights, backend, device=device, dtype=activations)
    return ChosenDecoder(
        model=assembled.model, tensors_fingerprint=assembled.tensors_fingerprint, kernels=backend.name, note=note
    )


def cuda_kernels(
    wanted: str, plain: TorchKernels, config: ModelConfig, library: FlashInferLibrary
) -> tuple[KernelBackend, str | None]:
    """Who attends on CUDA (FlashInfer where it proves itself, else Triton, else torch), and why it is nobody better.

    Args:
        wanted: `auto`, `flashinfer` or `triton`.
        plain: makes the linear maps, and says where and in what.
        config: the model's shape.
        library: where FlashInfer comes from.

    Raises:
        ConfigError: what is asked for by name cannot be.
        StartupError: trying FlashInfer broke the device.
    """
    if find_spec("triton") is None:
        if wanted != "auto":
            raise ConfigError(f"attention_backend: {wanted} needs the package triton; use auto")
        return plain, "triton is not installed"
    triton = TritonKernels(plain)
    if wanted == "triton":
        return triton, None
    try:
        attention = open_flashinfer(config, plain.dtype, plain.device, triton.attention(config), library)
    except FlashInferUnusable as unusable:
        if wanted == "flashinfer":
            raise ConfigError(f"attention_backend: flashinfer cannot be used: {unusable}; use auto or triton") from None
        return triton, str(unusable)
    return FlashInferKernels(plain, attention), None


def _why_not_compiled(config: ModelConfig, dtype: str, device: torch.device) -> str | None:
    """What keeps the compiled kernels from computing this, or None."""
    if device.type != "cpu":
        return f"the compiled kernels run on cpu, not on {device}"
    if dtype not in _COMPILED_DTYPES:
        return f"the compiled kernels do not compute {dtype}"
    return unsupported_reason(config)

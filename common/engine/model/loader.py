"""From a path to a model ready to serve.

Journey row 0 (startup). Owns: choosing the reader, the dtype and the kernels. Called once by a role's `main.py`.
"""

from pathlib import Path

import torch

from common.clock import Clock, SystemClock
from common.engine.chat_template import ChatTemplate
from common.engine.model.checkpoint import Checkpoint
from common.engine.model.gguf_reader import read_gguf
from common.engine.model.hf_reader import read_hf_folder
from common.engine.model.kernels import KernelBackend, TorchKernels
from common.engine.model.llama import assemble
from common.engine.model.loaded import LoadedModel
from common.errors import StartupError

# int8 is weight-only: activations and the KV cache stay float32.
_ACTIVATION_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.float32,
}


def load_model(
    path: Path, *, dtype: str = "float32", device: str = "cpu", kernels: str = "auto", clock: Clock | None = None
) -> LoadedModel:
    """Read a model and build its decoder.

    Args:
        path: a `.gguf` file or a Hugging Face folder.
        dtype: of weights and computation: float32, bfloat16, float16, or int8 (weights only; computes in float32).
        device: `cpu` or `cuda[:index]`.
        kernels: `torch`, or `auto` for the fastest that is there.
        clock: tells chat templates the date; the system's when None.

    Raises:
        StartupError: one line: what is missing, damaged, mismatched or not supported.
    """
    if dtype not in _ACTIVATION_DTYPES:
        raise StartupError(f"dtype {dtype} is not supported; supported: {', '.join(_ACTIVATION_DTYPES)}")
    place = _device(device)
    checkpoint = read_checkpoint(path)
    backend = _kernels(kernels, place, dtype)
    assembled = assemble(checkpoint.config, checkpoint.weights, backend, device=place, dtype=_ACTIVATION_DTYPES[dtype])
    return LoadedModel(
        config=checkpoint.config,
        model=assembled.model,
        tokenizer=checkpoint.tokenizer,
        chat_template=ChatTemplate(checkpoint.chat_template, checkpoint.special_tokens, clock or SystemClock()),
        generation=checkpoint.generation,
        weights_fingerprint=assembled.weights_fingerprint,
        kernels=backend.name,
    )


def read_checkpoint(path: Path) -> Checkpoint:
    """Everything about the model at `path` but its tensors, which are read when asked for.

    Raises:
        StartupError: there is nothing there, or it is neither a GGUF file nor a model folder.
    """
    if path.is_dir():
        return read_hf_folder(path)
    if not path.exists():
        raise StartupError(f"model {path}: no such file or folder")
    if path.suffix != ".gguf":
        raise StartupError(f"model {path}: neither a .gguf file nor a folder")
    return read_gguf(path)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise StartupError(f"device {name} is not one; use cpu or cuda[:index]") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise StartupError(f"device {name}: this machine has {torch.cuda.device_count()} CUDA devices")
    if device.type not in ("cpu", "cuda"):
        raise StartupError(f"device {name} is not supported; use cpu or cuda[:index]")
    return device


def _kernels(name: str, device: torch.device, dtype: str) -> KernelBackend:
    if name not in ("auto", "torch"):
        raise StartupError(f"kernels {name} are unknown; use auto or torch")
    return TorchKernels(device, _ACTIVATION_DTYPES[dtype], int8=dtype == "int8")

"""From a path to a model ready to serve.

Journey row 0 (startup). Owns: choosing the reader and the device. Who computes: `decoders`. Called once by a role's
`main.py`.
"""

from pathlib import Path

import torch

from common.clock import Clock, SystemClock
from common.engine.chat_template import ChatTemplate
from common.engine.model.checkpoint import Checkpoint
from common.engine.model.decoders import make_decoder
from common.engine.model.gguf_reader import read_gguf
from common.engine.model.hf_reader import read_hf_folder
from common.engine.model.loaded import LoadedModel
from common.errors import StartupError


def load_model(
    path: Path,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    kernels: str = "auto",
    num_threads: int = 0,
    clock: Clock | None = None,
) -> LoadedModel:
    """Read a model and build its decoder.

    Args:
        path: a `.gguf` file or a Hugging Face folder.
        dtype: of weights and computation: float32, bfloat16, float16, or int8 (weights only; computes in float32 but
            for attention, which follows the KV cache).
        device: `cpu` or `cuda[:index]`.
        kernels: `cpu` (compiled, CPU only), `flashinfer` or `triton` (CUDA only), `torch`, or `auto`: the fastest of
            them that works here.
        num_threads: CPU threads of the forward; 0 chooses by the cores there are.
        clock: tells chat templates the date; the system's when None.

    Raises:
        StartupError: one line: what is missing, damaged, mismatched or not supported.
    """
    place = _device(device)
    checkpoint = read_checkpoint(path)
    decoder = make_decoder(
        checkpoint.config, checkpoint.weights, kernels=kernels, dtype=dtype, device=place, num_threads=num_threads
    )
    return LoadedModel(
        config=checkpoint.config,
        model=decoder.model,
        tokenizer=checkpoint.tokenizer,
        chat_template=ChatTemplate(checkpoint.chat_template, checkpoint.special_tokens, clock or SystemClock()),
        generation=checkpoint.generation,
        tensors_fingerprint=decoder.tensors_fingerprint,
        kernels=decoder.kernels,
        kernels_note=decoder.note,
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

"""The border between file readers and the decoder: named tensors, checked as they are taken.

Owns: the `WeightSource` port, shape checks and the content fingerprint. Names are those of Hugging Face checkpoints.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from common.errors import StartupError


class WeightSource(Protocol):
    """Tensors of one checkpoint by Hugging Face name, read when asked for."""

    @property
    def names(self) -> frozenset[str]:
        """All tensors there are."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """The tensor in HF layout (q/k rows in rotate-half order), on the CPU, in its own float dtype.

        Raises:
            StartupError: there is none of that name, or its bytes cannot be read.
        """
        ...


class MemoryWeights:
    """Weights held in memory: random models of tests, and copies."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)

    @property
    def names(self) -> frozenset[str]:
        """All tensors there are."""
        return frozenset(self._tensors)

    def read(self, name: str) -> torch.Tensor:
        """The tensor itself, not a copy."""
        if name not in self._tensors:
            raise StartupError(f"model weights: tensor {name} is missing")
        return self._tensors[name]


class CheckedWeights:
    """Takes tensors from a source, checks shapes, and fingerprints what was taken.

    The fingerprint covers name, shape and about 64 evenly spaced values of each tensor in float32, so it is the same
    for a GGUF file and its exported folder, and different for another fine-tune.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._digests: dict[str, bytes] = {}

    def has(self, name: str) -> bool:
        """Whether the source has it."""
        return name in self._source.names

    def take(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """The tensor, if it has this shape.

        Raises:
            StartupError: missing, or of another shape; the message names tensor and both shapes.
        """
        tensor = self._source.read(name)
        if tuple(tensor.shape) != tuple(shape):
            raise StartupError(
                f"model weights: tensor {name} has shape {list(tensor.shape)}, the config says {list(shape)}"
            )
        flat = tensor.reshape(-1)
        sample = flat[:: max(1, flat.numel() // 64)].to(torch.float32)
        digest = hashlib.sha256(f"{name}{tuple(shape)}".encode())
        digest.update(sample.contiguous().numpy().tobytes())
        self._digests[name] = digest.digest()
        return tensor

    def fingerprint(self) -> str:
        """16 hex digits over everything taken so far, in whatever order."""
        return hashlib.sha256(b"".join(digest for _, digest in sorted(self._digests.items()))).hexdigest()[:16]

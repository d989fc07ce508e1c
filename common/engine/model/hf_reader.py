"""A Hugging Face folder as a `Checkpoint`: config.json, *.safetensors (or their index), tokenizer.json.

Owns: which files there are and what is said when one is missing. What they mean: `hf_config`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from common.engine.model.checkpoint import Checkpoint
from common.engine.model.hf_config import (
    HfConfig,
    HfGenerationConfig,
    HfTokenizerConfig,
    to_generation_defaults,
    to_model_config,
)
from common.engine.tokenizer import HfTokenizer
from common.errors import StartupError

StructT = TypeVar("StructT", bound=msgspec.Struct)


class _ShardIndex(msgspec.Struct, frozen=True):
    """`model.safetensors.index.json`."""

    weight_map: dict[str, str]


def read_hf_folder(folder: Path) -> Checkpoint:
    """Read everything but the tensors, which are read one by one later.

    Raises:
        StartupError: a file is missing, not what it should be, or describes an unsupported model.
    """
    written_config = _read_json(folder / "config.json", HfConfig)
    generation = _read_json_if_there(folder / "generation_config.json", HfGenerationConfig)
    tokenizer_config = _read_json_if_there(folder / "tokenizer_config.json", HfTokenizerConfig)
    special_tokens = tokenizer_config.special_tokens()
    tokenizer_json = _read_text(folder / "tokenizer.json")
    eos_token_ids = _ids(generation.eos_token_id) or _ids(written_config.eos_token_id)
    tokenizer = _tokenizer(folder, tokenizer_json, eos_token_ids, special_tokens.get("eos_token"))
    return Checkpoint(
        config=to_model_config(written_config, tokenizer.eos_token_ids),
        weights=SafetensorsWeights(folder),
        tokenizer=tokenizer,
        chat_template=_chat_template(folder, tokenizer_config),
        special_tokens=special_tokens,
        generation=to_generation_defaults(generation),
    )


class SafetensorsWeights:
    """Tensors of a folder's safetensors files.

    Raises:
        StartupError: there is no such file, or one is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = _tensor_files(folder)

    @property
    def names(self) -> frozenset[str]:
        """All tensors of all files."""
        return frozenset(self._files)

    def read(self, name: str) -> torch.Tensor:
        """The tensor in the dtype it is stored in, on the CPU."""
        path = self._files.get(name)
        if path is None:
            raise StartupError(f"{self._folder}: tensor {name} is missing")
        try:
            with safe_open(path, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise StartupError(f"{path}: cannot read tensor {name}: {error}") from error
        return tensor


def _tensor_files(folder: Path) -> Mapping[str, Path]:
    """Name of every tensor to its file."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = _read_json(index, _ShardIndex).weight_map
        missing = sorted({file for file in weight_map.values() if not (folder / file).exists()})
        if missing:
            raise StartupError(f"{folder}: {missing[0]} is missing ({len(missing)} of its weight files are)")
        return {name: folder / file for name, file in weight_map.items()}
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise StartupError(f"{folder}: no .safetensors file in it")
    files: dict[str, Path] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                files.update(dict.fromkeys(file.keys(), path))
        except (OSError, SafetensorError) as error:
            raise StartupError(f"{path}: not a readable safetensors file: {error}") from error
    return files


def _tokenizer(folder: Path, tokenizer_json: str, eos_token_ids: frozenset[int], eos_token: str | None) -> HfTokenizer:
    """The tokenizer; its own EOS token counts beside the generation config's."""
    try:
        tokenizer = HfTokenizer(tokenizer_json, eos_token_ids)
        own_eos = tokenizer.vocab().get(eos_token) if eos_token is not None else None
        if own_eos is None or own_eos in eos_token_ids:
            return tokenizer
        return HfTokenizer(tokenizer_json, eos_token_ids | {own_eos})
    except Exception as error:  # the tokenizers package raises bare Exception
        raise StartupError(f"{folder / 'tokenizer.json'}: {error}") from error


def _chat_template(folder: Path, tokenizer_config: HfTokenizerConfig) -> str | None:
    """`chat_template.jinja` where there is one, else what `tokenizer_config.json` says."""
    path = folder / "chat_template.jinja"
    return _read_text(path) if path.exists() else tokenizer_config.template()


def _ids(written: int | list[int] | None) -> frozenset[int]:
    if written is None:
        return frozenset()
    return frozenset(written if isinstance(written, list) else [written])


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise StartupError(f"{path.parent}: {path.name} is missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"{path}: {error}") from error


def _read_json(path: Path, kind: type[StructT]) -> StructT:
    try:
        return msgspec.json.decode(_read_text(path), type=kind)
    except msgspec.MsgspecError as error:
        raise StartupError(f"{path}: {error}") from error


def _read_json_if_there(path: Path, kind: type[StructT]) -> StructT:
    return _read_json(path, kind) if path.exists() else kind()

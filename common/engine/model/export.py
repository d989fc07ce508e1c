"""Any readable model as a Hugging Face folder, for peers that read only those: `python -m common.engine.model.export`.

Owns: writing config.json, generation_config.json, tokenizer.json, tokenizer_config.json and model.safetensors.
Does not know how the model was stored (`checkpoint.Checkpoint`).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from common.engine.model.checkpoint import Checkpoint
from common.engine.model.config import ModelConfig, ModelFamily
from common.engine.model.loader import read_checkpoint
from common.errors import StartupError

_ARCHITECTURES = {
    ModelFamily.LLAMA: "LlamaForCausalLM",
    ModelFamily.MISTRAL: "MistralForCausalLM",
    ModelFamily.QWEN2: "Qwen2ForCausalLM",
    ModelFamily.QWEN3: "Qwen3ForCausalLM",
}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export_checkpoint(checkpoint: Checkpoint, folder: Path, dtype: str = "float32") -> None:
    """Write the model as a folder that transformers and vLLM load.

    Args:
        checkpoint: what to write.
        folder: made when missing; files of the same names are replaced.
        dtype: of the written weights; a GGUF file's values survive exactly only in float32.

    Raises:
        StartupError: the config format cannot express the model, or a tensor cannot be read.
    """
    config = to_hf_config(checkpoint.config, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _to_hf_generation(checkpoint))
    _write_json(folder / "tokenizer_config.json", _to_hf_tokenizer_config(checkpoint))
    (folder / "tokenizer.json").write_text(checkpoint.tokenizer.hf_tokenizer_json, encoding="utf-8")
    names = sorted(name for name in checkpoint.weights.names if name.startswith(("model.", "lm_head.")))
    tensors = {name: checkpoint.weights.read(name).to(_DTYPES[dtype]).contiguous() for name in names}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def to_hf_config(config: ModelConfig, dtype: str) -> dict[str, object]:
    """The content of `config.json`.

    Raises:
        StartupError: rotary frequencies given one by one (GGUF's llama3 scaling) have no place there.
    """
    if config.rope.frequency_divisors:
        raise StartupError("export: rope_freqs of a GGUF file cannot be written to config.json")
    written: dict[str, object] = {
        "architectures": [_ARCHITECTURES[config.family]],
        "model_type": config.family.value,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "rope_theta": config.rope.theta,
        "rope_scaling": _to_hf_rope_scaling(config),
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": sorted(config.eos_token_ids) or None,
        "sliding_window": config.sliding_window,
        "torch_dtype": dtype,
    }
    if config.family is not ModelFamily.QWEN2:
        written["attention_bias"] = config.output_bias
    if config.family is ModelFamily.LLAMA:
        written["mlp_bias"] = config.mlp_bias
    if config.family in (ModelFamily.QWEN2, ModelFamily.QWEN3):
        written["use_sliding_window"] = config.sliding_window is not None
        written["max_window_layers"] = 0
    return written


def _to_hf_rope_scaling(config: ModelConfig) -> dict[str, object] | None:
    llama3 = config.rope.llama3
    if llama3 is not None:
        return {
            "rope_type": "llama3",
            "factor": llama3.factor,
            "low_freq_factor": llama3.low_freq_factor,
            "high_freq_factor": llama3.high_freq_factor,
            "original_max_position_embeddings": llama3.original_max_positions,
        }
    if config.rope.linear_factor != 1.0:
        return {"rope_type": "linear", "factor": config.rope.linear_factor}
    return None


def _to_hf_generation(checkpoint: Checkpoint) -> dict[str, object]:
    defaults = checkpoint.generation
    written: dict[str, object] = {
        "bos_token_id": checkpoint.config.bos_token_id,
        "eos_token_id": sorted(checkpoint.config.eos_token_ids) or None,
        "temperature": defaults.temperature,
        "top_p": defaults.top_p,
        "top_k": defaults.top_k,
        "min_p": defaults.min_p,
        "repetition_penalty": defaults.repetition_penalty,
        "max_new_tokens": defaults.max_new_tokens,
    }
    return {name: value for name, value in written.items() if value is not None}


def _to_hf_tokenizer_config(checkpoint: Checkpoint) -> dict[str, object]:
    written: dict[str, object] = {
        **checkpoint.special_tokens,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": checkpoint.config.max_positions,
    }
    if checkpoint.chat_template is not None:
        written["chat_template"] = checkpoint.chat_template
    return written


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0 when written, 1 with one line when not."""
    parser = argparse.ArgumentParser(prog="python -m common.engine.model.export", description=export_checkpoint.__doc__)
    parser.add_argument("model", type=Path, help="a .gguf file or a Hugging Face folder")
    parser.add_argument("folder", type=Path, help="where to write")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="float32", help="of the written weights")
    options = parser.parse_args(arguments)
    try:
        export_checkpoint(read_checkpoint(options.model), options.folder, options.dtype)
    except StartupError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{options.folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

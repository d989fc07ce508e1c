"""The engine's settings as written in the file (`engine:`, overridden by `prefill.engine:` / `decode.engine:`).

Owns: names, units, defaults. Does not know: the hardware; "auto" values are resolved where the hardware is probed.
"""

from typing import Annotated, Literal

import msgspec

Positive = Annotated[int, msgspec.Meta(ge=1)]


class GrammarConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Structured output. `compile_timeout_s` and `compile_memory_bytes` really end the work when passed."""

    backend: Literal["auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer"] = "auto"
    on_inexact: Literal["refuse", "validate"] = "refuse"
    compile_timeout_s: float = 10.0
    compile_memory_bytes: Positive = 2 << 30
    cache_bytes: Positive = 512 << 20
    prepared_ttl_s: float = 60.0
    disable_any_whitespace: bool = False
    enable_in_reasoning: bool = False


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens guessed without a second model and checked in one forward; the output is the same with and without.

    Names and meaning as in vLLM 0.32 `speculative_config`, whose `ngram` this is; `grammar` is ours.

    Attributes:
        method: who guesses: the grammar where it leaves no choice, what followed the same tokens before, both, nobody.
        num_speculative_tokens: most guesses per request and step; fewer where they turn out wrong.
        prompt_lookup_min: how many tokens must have stood before in the same order.
        prompt_lookup_max: among several places, that with the longest equal past wins, up to this many tokens.
        disable_by_batch_size: with more requests running than this, nobody guesses.
    """

    method: Literal["none", "ngram", "grammar", "grammar+ngram"] = "none"
    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=1, le=16)] = 4
    prompt_lookup_min: Positive = 3
    prompt_lookup_max: Positive = 6
    disable_by_batch_size: Positive = 4


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine.

    Attributes:
        model: a `.gguf` file or a Hugging Face folder; a relative path starts at the config file's folder.
        served_model_name: what clients write in `model`.
        device: `cpu` or `cuda[:index]`.
        dtype: of weights and computation.
        kv_cache_dtype: of K and V in memory and on the way from P to D; `auto` is what activations are computed in, and
            bfloat16 for int8 (half the bytes; vLLM's name for the option). P and D must agree.
        num_threads: CPU threads of the forward; 0 chooses by the cores there are.
        attention_backend: on CUDA: FlashInfer, Triton, or FlashInfer where it is installed and passes its check at the
            start, else Triton (vLLM's name for the option); `auto` on the CPU, where there is no choice.
        decode_graphs: on CUDA: record decode steps as graphs at the start; their attention is Triton's in any case.
        max_model_len_tokens: longest prompt plus output; 0 is the model's own limit.
        block_size: tokens per KV block.
        num_kv_blocks: size of the pool; 0 derives it from `kv_cache_bytes`.
        kv_cache_bytes: memory for the pool when `num_kv_blocks` is 0.
        max_num_seqs: most requests in one step.
        max_num_batched_tokens: token budget of a step; longer prompts are computed in chunks.
        max_queued_requests: more than this waiting answers 429.
        enable_prefix_cache: reuse blocks of equal prefixes.
        logprobs_mode: what `logprobs` reports (vLLM's four modes).
        max_logprobs: most alternatives a request may ask for.
        logits_processors: `module:Class` of extra processors, beside the entry points `pd_serve.logits_processors`.
        reasoning_parser: name of the tags that enclose thinking; null when the model does not think.
        tool_parser: how the model writes tool calls; null leaves them as text.
        speculative_config: tokens guessed for decodes to check; off where nothing is written.
        constraint_in_prompt: whether the chat template renders `response_format`/`tool_choice` into the prompt.
    """

    model: str
    served_model_name: str = "smollm2"
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float16", "int8"] = "float32"
    kv_cache_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    num_threads: Annotated[int, msgspec.Meta(ge=0)] = 0
    attention_backend: Literal["auto", "flashinfer", "triton"] = "auto"
    decode_graphs: bool = True
    max_model_len_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    block_size: Positive = 16
    num_kv_blocks: Annotated[int, msgspec.Meta(ge=0)] = 0
    kv_cache_bytes: Positive = 1 << 30
    max_num_seqs: Positive = 32
    max_num_batched_tokens: Positive = 512
    max_queued_requests: Positive = 1024
    enable_prefix_cache: bool = True
    logprobs_mode: Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"] = "raw_logprobs"
    max_logprobs: int = 20
    logits_processors: tuple[str, ...] = ()
    reasoning_parser: str | None = None
    tool_parser: str | None = None
    constraint_in_prompt: bool = False
    speculative_config: SpeculativeConfig = SpeculativeConfig()
    grammar: GrammarConfig = GrammarConfig()

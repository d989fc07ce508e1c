"""The engine's resolved settings: config plus what the model and the pool turned out to be.

Owns: the numbers a running core obeys. Made once at the start. Does not know: files, devices.
"""

from dataclasses import dataclass
from typing import Literal

from common.config.engine import EngineConfig, SpeculativeConfig
from common.engine.kv_cache.storage import KvCacheStorage

PullFailurePolicy = Literal["recompute", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSettings:
    """What `EngineCore` obeys.

    Attributes:
        max_num_seqs: most requests that run or pull at a time; never more than the token budget.
        max_num_batched_tokens: token budget of a step.
        max_model_len_tokens: longest prompt plus output; never more than the pool holds, so a request that fits it
            always finds room in the end.
        eos_token_ids: all of the model's.
        enable_prefix_cache: reuse blocks of equal prefixes.
        prompt_logprobs_as_logits: report prompt logits instead of log probabilities.
        on_pull_failure: compute the prompt here, or end the request with `TransferError`.
        speculation: who guesses tokens for decodes to check, and how many; None: nobody.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len_tokens: int
    eos_token_ids: frozenset[int]
    enable_prefix_cache: bool = True
    prompt_logprobs_as_logits: bool = False
    on_pull_failure: PullFailurePolicy = "recompute"
    speculation: SpeculativeConfig | None = None

    @classmethod
    def resolve(
        cls,
        config: EngineConfig,
        kv_cache: KvCacheStorage,
        *,
        model_context_tokens: int,
        eos_token_ids: frozenset[int],
        on_pull_failure: PullFailurePolicy = "recompute",
    ) -> "CoreSettings":
        """Settings of a core over `kv_cache`.

        Args:
            config: as written.
            kv_cache: the allocated pool.
            model_context_tokens: the model's own limit (`ModelConfig.max_positions`).
            eos_token_ids: the model's.
            on_pull_failure: D's policy.
        """
        limits = (
            config.max_model_len_tokens or model_context_tokens,
            model_context_tokens,
            kv_cache.num_blocks * kv_cache.block_size,
        )
        return cls(
            max_num_seqs=min(config.max_num_seqs, config.max_num_batched_tokens),
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len_tokens=min(limits),
            eos_token_ids=eos_token_ids,
            enable_prefix_cache=config.enable_prefix_cache,
            prompt_logprobs_as_logits=config.logprobs_mode in ("raw_logits", "processed_logits"),
            on_pull_failure=on_pull_failure,
            speculation=None if config.speculative_config.method == "none" else config.speculative_config,
        )

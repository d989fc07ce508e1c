"""The border between the runner and a model: one batch of tokens in, logits out.

Owns: `ForwardBatch` and the `DecoderModel` port. Tokens of all sequences are concatenated (no padding):

    token_ids   | seq 0: chunk of a prompt | seq 1: 1 decode token | seq 2 ... |
    query_start 0                          n0                      n0+1
"""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """Tokens to compute in one step. All tensors on the model's device.

    Attributes:
        token_ids: int64 [num_tokens].
        positions: int64 [num_tokens], position in the sequence.
        slot_mapping: int64 [num_tokens], `block_id * block_size + offset` where this token's K and V go.
        block_tables: int32 [num_seqs, max_blocks], unused entries 0.
        query_start: host copy of where each sequence's tokens begin, length num_seqs + 1.
        seq_lens: host copy of each sequence's length including this step's tokens, length num_seqs.
        logits_indices: int64 [num_logits], rows of `token_ids` whose next-token logits are wanted.
        is_decode: one token per sequence and the logits of each, in order. Said by whoever makes the batch: reading
            `logits_indices` back would make the host wait for the device.
        is_recorded: what is asked of the device is recorded and replayed with other values in the same tensors:
            `seq_lens` are the longest there may be, and nothing may be worked out from them on the host.
        highest: int64 CPU [num_logits], or None: where a model that can says the first token with the highest logit of
            each row of logits, -1 where that is no finite number or a logit is NaN. Others leave it as it is: -1.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    query_start: tuple[int, ...]
    seq_lens: tuple[int, ...]
    logits_indices: torch.Tensor
    is_decode: bool = False
    is_recorded: bool = False
    highest: torch.Tensor | None = None


class DecoderModel(Protocol):
    """A causal decoder over a paged cache."""

    def forward(self, batch: ForwardBatch, kv_cache: torch.Tensor) -> torch.Tensor:
        """Write K and V of the batch into `kv_cache` and return next-token logits.

        Args:
            batch: the step's tokens.
            kv_cache: `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`; changed in place.

        Returns:
            float32 `[num_logits, vocab_size]`, owned by the caller.
        """
        ...

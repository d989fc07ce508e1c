"""A decoder that is all arithmetic: it stores tokens and positions in the KV cache and reads its context back from it.

Its next token is a hash of the whole context as found through the block tables, so any block that is shared, freed,
copied, pulled or overwritten wrongly changes the output, and a position out of place raises at once.
"""

from collections.abc import Sequence

import torch

from common.engine.kv_cache.storage import KvCacheStorage, KvShape
from common.engine.model.forward import ForwardBatch

VOCAB_SIZE = 61
EOS = 0


def next_token(context: Sequence[int]) -> int:
    """What the fake model says after `context`; the reference for tests."""
    return sum((token + 1) * (place % 13 + 3) for place, token in enumerate(context)) % VOCAB_SIZE


def continuation(prompt: Sequence[int], max_tokens: int, *, ignore_eos: bool = False) -> list[int]:
    """The greedy output of a fake engine, computed without one; ends with EOS when that comes."""
    context = list(prompt)
    while len(context) < len(prompt) + max_tokens:
        context.append(next_token(context))
        if context[-1] == EOS and not ignore_eos:
            break
    return context[len(prompt) :]


def fake_storage(num_blocks: int, block_size: int) -> KvCacheStorage:
    shape = KvShape(num_layers=1, block_size=block_size, num_kv_heads=1, head_dim=1, dtype=torch.float32)
    return KvCacheStorage(num_blocks, shape, torch.device("cpu"))


class FakeModel:
    """A `DecoderModel`; `fail_next` makes the next forward raise."""

    def __init__(self) -> None:
        self.fail_next: Exception | None = None
        self.num_forwards = 0
        self.num_tokens: list[int] = []
        self.max_logits = 0

    def forward(self, batch: ForwardBatch, kv_cache: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        self.num_tokens.append(len(batch.token_ids))
        self.max_logits = max(self.max_logits, len(batch.logits_indices))
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        block_size = kv_cache.shape[3]
        blocks, offsets = batch.slot_mapping // block_size, batch.slot_mapping % block_size
        kv_cache[blocks, 0, 0, offsets, 0, 0] = batch.token_ids.to(torch.float32)
        kv_cache[blocks, 0, 1, offsets, 0, 0] = batch.positions.to(torch.float32)
        logits = torch.zeros(len(batch.logits_indices), VOCAB_SIZE)
        for row, index in enumerate(batch.logits_indices.tolist()):
            context = self._context(batch, kv_cache, index)
            logits[row] = torch.arange(VOCAB_SIZE) / -1000.0
            logits[row, next_token(context)] = 10.0
        return logits

    def _context(self, batch: ForwardBatch, kv_cache: torch.Tensor, index: int) -> list[int]:
        seq = next(i for i, end in enumerate(batch.query_start[1:]) if index < end)
        length = batch.seq_lens[seq] - (batch.query_start[seq + 1] - 1 - index)
        assert int(batch.positions[index]) == length - 1
        places = torch.arange(length)
        blocks = batch.block_tables[seq][places // kv_cache.shape[3]].long()
        stored = kv_cache[blocks, 0, :, places % kv_cache.shape[3], 0, 0].long()
        assert stored[:, 1].tolist() == list(range(length)), "the context is not where its block table says"
        return stored[:, 0].tolist()

"""Drives a decoder the way the runner does: sequences in blocks of a scattered cache, any number of tokens per step."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from common.engine.model.config import ModelConfig
from common.engine.model.forward import DecoderModel, ForwardBatch


@dataclass
class PagedSequence:
    """One sequence: its tokens so far and the blocks it owns, in an order that is not that of memory."""

    block_ids: list[int]
    token_ids: list[int] = field(default_factory=list)


class PagedDriver:
    """A cache full of large garbage (so that reading a slot nobody wrote shows) and sequences in it."""

    def __init__(
        self,
        model: DecoderModel,
        config: ModelConfig,
        num_blocks: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        self._model = model
        self._block_size = block_size
        self._device = device
        shape = (num_blocks, config.num_layers, 2, block_size, config.num_kv_heads, config.head_dim)
        generator = torch.Generator().manual_seed(99)
        self.kv_cache = torch.randn(shape, generator=generator).mul_(100).to(device, dtype)
        self._free = torch.randperm(num_blocks, generator=generator).tolist()

    def new_sequence(self) -> PagedSequence:
        return PagedSequence(block_ids=[])

    def step(
        self, new_tokens: Sequence[tuple[PagedSequence, Sequence[int]]], wanted_from: int = 0
    ) -> list[torch.Tensor]:
        """Compute the given tokens of several sequences in one batch; logits `[n, vocab]` of each sequence's tokens.

        `wanted_from`: only of positions from here on.
        """
        tables, tokens, positions, slots, starts, lengths = [], [], [], [], [0], []
        for sequence, token_ids in new_tokens:
            start = len(sequence.token_ids)
            sequence.token_ids.extend(token_ids)
            while len(sequence.block_ids) * self._block_size < len(sequence.token_ids):
                sequence.block_ids.append(self._free.pop())
            places = range(start, len(sequence.token_ids))
            tokens.extend(token_ids)
            positions.extend(places)
            slots.extend(
                sequence.block_ids[place // self._block_size] * self._block_size + place % self._block_size
                for place in places
            )
            starts.append(len(tokens))
            lengths.append(len(sequence.token_ids))
            tables.append(sequence.block_ids)
        widest = max(map(len, tables))
        batch = ForwardBatch(
            token_ids=torch.tensor(tokens, device=self._device),
            positions=torch.tensor(positions, device=self._device),
            slot_mapping=torch.tensor(slots, device=self._device),
            block_tables=torch.tensor(
                [blocks + [0] * (widest - len(blocks)) for blocks in tables], dtype=torch.int32, device=self._device
            ),
            query_start=tuple(starts),
            seq_lens=tuple(lengths),
            logits_indices=torch.tensor(
                [row for row, place in enumerate(positions) if place >= wanted_from],
                dtype=torch.int64,
                device=self._device,
            ),
        )
        logits = self._model.forward(batch, self.kv_cache)
        counts = [
            sum(place >= wanted_from for place in positions[start:end]) for start, end in itertools.pairwise(starts)
        ]
        return list(logits.split(counts))

    def run(self, token_ids: Sequence[int], chunk_lengths: Sequence[int], last: int | None = None) -> torch.Tensor:
        """One fresh sequence in chunks of these lengths (the last one takes the rest); logits `[n, vocab]`.

        `last`: only of the last so many tokens.
        """
        wanted_from = 0 if last is None else max(0, len(token_ids) - last)
        sequence = self.new_sequence()
        parts, done = [], 0
        for length in [*chunk_lengths, len(token_ids)]:
            chunk = token_ids[done : done + length]
            if chunk:
                parts.append(self.step([(sequence, chunk)], wanted_from)[0])
            done += len(chunk)
        self._free.extend(sequence.block_ids)
        return torch.cat(parts)

"""Attention by its definition, and batches over a garbage-filled cache whose right answer is known."""

import math

import torch

from common.engine.model.config import ModelConfig
from common.engine.model.forward import ForwardBatch

BLOCK_SIZE = 4


def attend_plainly(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first_position: int, window: int | None
) -> torch.Tensor:
    """One sequence, token by token and head by head: the definition."""
    num_queries, num_heads, head_dim = query.shape
    group = num_heads // keys.shape[1]
    out = torch.empty(num_queries, num_heads, head_dim)
    for token in range(num_queries):
        last = first_position + token
        first = 0 if window is None else max(0, last - window + 1)
        for head in range(num_heads):
            seen = slice(first, last + 1)
            scores = keys[seen, head // group] @ query[token, head] / math.sqrt(head_dim)
            out[token, head] = scores.softmax(0) @ values[seen, head // group]
    return out.flatten(1)


def make_case(
    config: ModelConfig, history_and_new: list[tuple[int, int]], seed: int, block_size: int = BLOCK_SIZE
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, ForwardBatch, torch.Tensor], torch.Tensor]:
    """A cache of garbage that holds each sequence's history, a batch that adds the new tokens, and the truth."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    blocks_needed = [-(-(history + new) // block_size) for history, new in history_and_new]
    free = torch.randperm(sum(blocks_needed) + 3, generator=generator).tolist()
    cache = random(len(free), config.num_layers, 2, block_size, config.num_kv_heads, config.head_dim) * 50
    tables, slots, starts, truth_inputs = [], [], [0], []
    queries, new_keys, new_values = [], [], []
    for (history, new), num_blocks in zip(history_and_new, blocks_needed, strict=True):
        table = [free.pop() for _ in range(num_blocks)]
        keys, values = (random(history + new, config.num_kv_heads, config.head_dim) for _ in range(2))
        for place in range(history):
            cache[table[place // block_size], 1, 0, place % block_size] = keys[place]
            cache[table[place // block_size], 1, 1, place % block_size] = values[place]
        query = random(new, config.num_heads, config.head_dim)
        places = range(history, history + new)
        slots.extend(table[place // block_size] * block_size + place % block_size for place in places)
        starts.append(starts[-1] + new)
        tables.append(table)
        queries.append(query)
        new_keys.append(keys[history:])
        new_values.append(values[history:])
        truth_inputs.append((query, keys, values, history))
    widest = max(blocks_needed)
    num_tokens = starts[-1]
    batch = ForwardBatch(
        token_ids=torch.zeros(num_tokens, dtype=torch.int64),
        positions=torch.tensor([place for history, new in history_and_new for place in range(history, history + new)]),
        slot_mapping=torch.tensor(slots),
        block_tables=torch.tensor([table + [0] * (widest - len(table)) for table in tables], dtype=torch.int32),
        query_start=tuple(starts),
        seq_lens=tuple(history + new for history, new in history_and_new),
        logits_indices=torch.arange(num_tokens),
    )
    truth = torch.cat([attend_plainly(*inputs, config.sliding_window) for inputs in truth_inputs])
    return (torch.cat(queries), torch.cat(new_keys), torch.cat(new_values), 1, batch, cache), truth

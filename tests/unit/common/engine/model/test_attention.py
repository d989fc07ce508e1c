import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.model.attention import TorchPagedAttention
from common.engine.model.forward import ForwardBatch
from tests.support.tiny_model import tiny_config

BLOCK_SIZE = 4


def attend_plainly(query, keys, values, first_position, window):
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


def make_case(config, history_and_new, seed):
    """A cache of garbage that holds each sequence's history, a batch that adds the new tokens, and the truth."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    blocks_needed = [-(-(history + new) // BLOCK_SIZE) for history, new in history_and_new]
    free = torch.randperm(sum(blocks_needed) + 3, generator=generator).tolist()
    cache = random(len(free), config.num_layers, 2, BLOCK_SIZE, config.num_kv_heads, config.head_dim) * 50
    tables, slots, starts, truth_inputs = [], [], [0], []
    queries, new_keys, new_values = [], [], []
    for (history, new), num_blocks in zip(history_and_new, blocks_needed, strict=True):
        table = [free.pop() for _ in range(num_blocks)]
        keys, values = (random(history + new, config.num_kv_heads, config.head_dim) for _ in range(2))
        for place in range(history):
            cache[table[place // BLOCK_SIZE], 1, 0, place % BLOCK_SIZE] = keys[place]
            cache[table[place // BLOCK_SIZE], 1, 1, place % BLOCK_SIZE] = values[place]
        query = random(new, config.num_heads, config.head_dim)
        places = range(history, history + new)
        slots.extend(table[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE for place in places)
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
        positions=torch.zeros(num_tokens, dtype=torch.int64),
        slot_mapping=torch.tensor(slots),
        block_tables=torch.tensor([table + [0] * (widest - len(table)) for table in tables], dtype=torch.int32),
        query_start=tuple(starts),
        seq_lens=tuple(history + new for history, new in history_and_new),
        logits_indices=torch.arange(num_tokens),
    )
    truth = torch.cat([attend_plainly(*inputs, config.sliding_window) for inputs in truth_inputs])
    return (torch.cat(queries), torch.cat(new_keys), torch.cat(new_values), 1, batch, cache), truth


@settings(max_examples=30, deadline=None)
@given(
    history_and_new=st.lists(
        st.tuples(st.integers(0, 11), st.sampled_from([1, 1, 2, 3, 9, 12])), min_size=1, max_size=5
    ),
    window=st.sampled_from([None, 1, 5]),
    heads=st.sampled_from([(4, 2), (3, 3), (6, 1)]),
    seed=st.integers(0, 1000),
)
def test_any_mix_of_decode_rows_and_chunks_equals_plain_attention(history_and_new, window, heads, seed):
    config = tiny_config(num_heads=heads[0], num_kv_heads=heads[1], sliding_window=window)
    arguments, truth = make_case(config, history_and_new, seed)

    out = TorchPagedAttention(config).attend(*arguments)

    torch.testing.assert_close(out, truth, atol=2e-5, rtol=1e-4)


def test_only_the_batch_slots_of_that_layer_change_in_the_cache():
    config = tiny_config(num_heads=4, num_kv_heads=2)
    (query, key, value, layer, batch, cache), _ = make_case(config, [(3, 2), (6, 1)], seed=1)
    before = cache.clone()

    TorchPagedAttention(config).attend(query, key, value, layer, batch, cache)

    changed = (cache != before).flatten(3).any(dim=-1)  # [num_blocks, num_layers, 2]
    touched = {int(slot) // BLOCK_SIZE for slot in batch.slot_mapping}
    assert {int(block) for block in changed.any(dim=(1, 2)).nonzero()} == touched
    assert not changed[:, 0].any()
    for row, slot in enumerate(batch.slot_mapping.tolist()):
        assert torch.equal(cache[slot // BLOCK_SIZE, layer, 0, slot % BLOCK_SIZE], key[row])
        assert torch.equal(cache[slot // BLOCK_SIZE, layer, 1, slot % BLOCK_SIZE], value[row])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_caches_work(dtype):
    config = tiny_config(num_heads=4, num_kv_heads=2)
    (query, key, value, layer, batch, cache), truth = make_case(config, [(5, 4), (9, 1)], seed=3)
    arguments = (query.to(dtype), key.to(dtype), value.to(dtype), layer, batch, cache.to(dtype))

    out = TorchPagedAttention(config).attend(*arguments)

    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), truth, atol=5e-2, rtol=5e-2)

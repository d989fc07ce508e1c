import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.model.attention import TorchPagedAttention
from tests.support.attention_cases import BLOCK_SIZE, make_case
from tests.support.tiny_model import tiny_config


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

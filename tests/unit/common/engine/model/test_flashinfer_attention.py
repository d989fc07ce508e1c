import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.model.attention import TorchPagedAttention
from common.engine.model.flashinfer_attention import FlashInferAttention, page_table
from common.engine.model.kernels import FlashInferKernels, TorchKernels
from common.engine.model.llama import assemble
from common.engine.model.weights import MemoryWeights
from tests.support.attention_cases import make_case
from tests.support.fake_flashinfer import FakeFence, FakePrefillWrapper
from tests.support.paged_forward import PagedDriver
from tests.support.tiny_model import random_weights, tiny_config

CPU = torch.device("cpu")
PROMPT = list(b"A prompt of several blocks, so that chunks cut it everywhere.")


def attention_with(config, wrapper):
    return FlashInferAttention(config, wrapper, FakeFence(wrapper.events), recorded=TorchPagedAttention(config))


def halved(arguments):
    return [part.half() if isinstance(part, torch.Tensor) else part for part in arguments]


@settings(max_examples=40, deadline=None)
@given(
    history_and_new=st.lists(
        st.tuples(st.integers(0, 11), st.sampled_from([1, 1, 2, 3, 9, 12])), min_size=1, max_size=5
    ),
    window=st.sampled_from([None, 1, 5]),
    heads=st.sampled_from([(4, 2), (3, 3), (9, 3), (7, 1)]),
    block_size=st.sampled_from([1, 3, 4, 16]),
    seed=st.integers(0, 1000),
)
def test_any_mix_of_decode_rows_and_chunks_equals_plain_attention(history_and_new, window, heads, block_size, seed):
    config = tiny_config(num_heads=heads[0], num_kv_heads=heads[1], head_dim=64, sliding_window=window)
    arguments, truth = make_case(config, history_and_new, seed, block_size)

    out = attention_with(config, FakePrefillWrapper()).attend(*halved(arguments))

    torch.testing.assert_close(out.float(), truth, atol=5e-3, rtol=5e-3)


def test_the_cache_holds_what_plain_attention_leaves_in_it():
    config = tiny_config(num_heads=4, num_kv_heads=2, head_dim=64)
    arguments, _ = make_case(config, [(3, 2), (6, 1), (0, 12)], seed=1)
    ours, plain = halved(arguments), halved(arguments)

    attention_with(config, FakePrefillWrapper()).attend(*ours)
    TorchPagedAttention(config).attend(*plain)

    assert torch.equal(ours[-1], plain[-1])


def test_a_batch_in_flashinfers_terms_names_only_the_pages_that_are_used():
    (*_, batch, _), _ = make_case(tiny_config(), [(3, 1), (0, 9), (4, 1)], seed=1)
    tables = batch.block_tables.tolist()

    table = page_table(batch, 4)

    assert table.query_starts.tolist() == [0, 1, 10, 11]
    assert table.page_starts.tolist() == [0, 1, 4, 6]
    assert table.last_page_len.tolist() == [4, 1, 1]
    assert table.pages.tolist() == [tables[0][0], *tables[1], *tables[2][:2]]


def test_the_cache_is_read_where_it_lies():
    class Watching(FakePrefillWrapper):
        def run(self, q, paged_kv_cache, *, out):
            self.cache = paged_kv_cache
            return super().run(q, paged_kv_cache, out=out)

    config, wrapper = tiny_config(head_dim=64), Watching()
    arguments, _ = make_case(config, [(3, 2)], seed=1)
    arguments = halved(arguments)
    attention_with(config, wrapper).attend(*arguments)

    assert wrapper.cache.untyped_storage().data_ptr() == arguments[-1].untyped_storage().data_ptr()


def models(wrapper):
    """The same float16 model with our attention and with plain attention."""
    config = tiny_config(head_dim=64)
    plain = TorchKernels(CPU, torch.float16)
    weights = MemoryWeights(random_weights(config))
    ours = FlashInferKernels(plain, attention_with(config, wrapper))
    made = (assemble(config, weights, kernels, device=CPU, dtype=torch.float16).model for kernels in (ours, plain))
    return config, *made


@pytest.mark.parametrize("chunks", [[], [5, 1, 1, 20], [16, 16, 1]])
def test_chunked_prompts_and_decodes_have_the_logits_of_plain_attention(chunks):
    config, ours, plain = models(FakePrefillWrapper())
    expected = PagedDriver(plain, config, num_blocks=16, dtype=torch.float16).run(PROMPT, [])

    logits = PagedDriver(ours, config, num_blocks=16, dtype=torch.float16).run(PROMPT, chunks)

    torch.testing.assert_close(logits, expected, atol=2e-2, rtol=2e-2)


def test_a_step_is_planned_once_and_only_after_the_copies_of_the_plan_before_are_done():
    wrapper = FakePrefillWrapper()
    config, ours, _ = models(wrapper)

    PagedDriver(ours, config, num_blocks=16, dtype=torch.float16).run(PROMPT, [20, 1])

    assert config.num_layers == 2
    assert wrapper.events == ["wait", "plan", "mark", "run", "run"] * 3


def test_a_plan_that_failed_leaves_none_behind_not_even_the_one_before():
    class FailingOnce(FakePrefillWrapper):
        def plan(self, *arguments, **options):
            if self.num_plans == 1:
                self.num_plans, self._indices = 2, ()
                raise RuntimeError("no workspace")
            super().plan(*arguments, **options)

    config = tiny_config(head_dim=64)
    arguments, truth = make_case(config, [(3, 2)], seed=1)
    others, _ = make_case(config, [(0, 9)], seed=2)
    attention = attention_with(config, FailingOnce())
    attention.attend(*halved(arguments))
    with pytest.raises(RuntimeError, match="no workspace"):
        attention.attend(*halved(others))

    torch.testing.assert_close(attention.attend(*halved(arguments)).float(), truth, atol=5e-3, rtol=5e-3)


def test_a_batch_that_is_recorded_goes_to_the_other_attention():
    config, wrapper = tiny_config(head_dim=64), FakePrefillWrapper()
    (*tensors, layer, batch, cache), _ = make_case(config, [(3, 1), (7, 1)], seed=1)
    arguments = halved((*tensors, layer, dataclasses.replace(batch, is_recorded=True), cache))

    out = attention_with(config, wrapper).attend(*arguments)

    assert wrapper.events == []
    assert torch.equal(out, TorchPagedAttention(config).attend(*arguments))

from collections.abc import Sequence

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from common.engine.model.forward import ForwardBatch
from common.engine.request_state import FinishReason
from common.engine.scheduling.sequence import Request
from common.ids import RequestId
from tests.support.engine_actions import ACTIONS
from tests.support.fake_engine import FakeEngine, ask, greedy, make_engine
from tests.support.fake_grammar import up_to
from tests.support.fake_model import FakeModel, continuation

BLOCK_SIZE = 4


def slot(request: Request, position: int) -> int:
    return request.holding.table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


def tables(requests: Sequence[Request]) -> list[list[int]]:
    width = max(-(-request.num_tokens // BLOCK_SIZE) for request in requests)
    cut = [list(map(int, request.holding.table.slice(0, width))) for request in requests]
    return [blocks + [0] * (width - len(blocks)) for blocks in cut]


class Auditor(FakeModel):
    """Holds every plain decode against what its requests say, and counts those in the memory of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.engine: FakeEngine | None = None
        self.num_decodes = self.num_kept = 0
        self._last = torch.empty(0)

    def forward(self, batch: ForwardBatch, kv_cache: torch.Tensor) -> torch.Tensor:
        last, self._last = self._last, batch.token_ids
        if batch.is_decode:
            self.num_decodes += 1
            self.num_kept += last.data_ptr() == self._last.data_ptr()
            self._check(batch)
        return super().forward(batch, kv_cache)

    def _check(self, batch: ForwardBatch) -> None:
        assert self.engine is not None
        by_row = list(self.engine.core.scheduler.running)
        if len(by_row) != len(batch.seq_lens):
            return  # somebody's prompt found no budget; that the context is right is checked by every forward
        assert batch.seq_lens == tuple(request.num_tokens for request in by_row)
        assert batch.token_ids.tolist() == [request.token_ids[-1] for request in by_row]
        assert batch.positions.tolist() == [request.num_tokens - 1 for request in by_row]
        assert batch.slot_mapping.tolist() == [slot(request, request.num_tokens - 1) for request in by_row]
        assert batch.block_tables.tolist() == tables(by_row)
        assert batch.query_start == tuple(range(len(by_row) + 1))
        assert batch.logits_indices.tolist() == list(range(len(by_row)))


def audited(num_blocks: int) -> tuple[FakeEngine, Auditor]:
    model = Auditor()
    model.engine = make_engine(num_blocks, BLOCK_SIZE, max_num_seqs=4, model=model)
    return model.engine, model


def test_decodes_go_on_in_the_memory_of_the_step_before_until_tables_grow_or_somebody_comes() -> None:
    engine, model = audited(64)
    engine.add(ask("a", [1, 2], greedy(21, ignore_eos=True)))
    for _ in range(10):
        engine.step()
    # Tokens 3, then 4, which is the first of a decode; 5 and 9 need another block in the longest table.
    assert (model.num_decodes, model.num_kept) == (9, 6)
    engine.add(ask("b", [3], greedy(1, ignore_eos=True)))
    engine.run()
    assert engine.answers.tokens("a") == continuation([1, 2], 21, ignore_eos=True)
    assert engine.answers.tokens("b") == continuation([3], 1, ignore_eos=True)


def test_a_shorter_sequence_gets_its_next_block_within_the_longest_ones_table() -> None:
    engine, model = audited(64)
    engine.add(ask("long", range(1, 12), greedy(9, ignore_eos=True)))
    engine.add(ask("short", [1, 2], greedy(9, ignore_eos=True)))
    engine.run()
    assert engine.answers.tokens("long") == continuation(range(1, 12), 9, ignore_eos=True)
    assert engine.answers.tokens("short") == continuation([1, 2], 9, ignore_eos=True)
    assert model.num_kept == 5  # of 8: but for the first and two further blocks of the long one's


@settings(max_examples=60, deadline=None)
@given(st.lists(ACTIONS, max_size=14), st.integers(8, 16))
def test_a_kept_batch_is_what_a_new_one_would_be_through_any_coming_going_and_preempting(
    actions: list[tuple[str, int, int]], num_blocks: int
) -> None:
    engine, _ = audited(num_blocks)
    asked: dict[str, list[int]] = {}
    aborted, constrained = set[str](), set[str]()
    for kind, first, second in actions:
        if kind in ("add", "constrained"):
            name = str(len(asked))
            asked[name] = [(7 * len(asked) + place) % 50 + 1 for place in range(first)]
            constraint = up_to(second) if kind == "constrained" else None
            if constraint is not None:
                constrained.add(name)
            engine.add(ask(name, asked[name], greedy(20, ignore_eos=constraint is None), constraint=constraint))
        elif kind == "step":
            for _ in range(first):
                engine.step()
        else:
            engine.core.abort(RequestId(str(first)))
            aborted.add(str(first))
    engine.run()
    assert not engine.core.scheduler.running
    for name, prompt in asked.items():
        wanted = {FinishReason.STOP} if name in constrained else {FinishReason.LENGTH}
        assert engine.answers.finish(name) in (wanted | {FinishReason.ABORTED} if name in aborted else wanted)
        if name not in constrained and name not in aborted:
            assert engine.answers.tokens(name) == continuation(prompt, 20, ignore_eos=True)

import torch

from common.engine.admission import make_choices
from common.engine.model.forward import ForwardBatch
from common.engine.runner.input_batch import InputBatch
from common.engine.runner.model_runner import ModelRunner, StepLogits
from common.engine.sampling.batch_state import NO_CHANGE
from common.engine.scheduling.sequence import Request
from common.engine.step import ScheduledChunk, StepPlan
from common.ids import BlockId
from tests.support.fake_engine import ask
from tests.support.fake_model import fake_storage


class Recorder:
    """A `DecoderModel` that keeps what it was given; its logits are the batch rows asked for."""

    def __init__(self) -> None:
        self.batches: list[ForwardBatch] = []

    def forward(self, batch: ForwardBatch, kv_cache: torch.Tensor) -> torch.Tensor:
        self.batches.append(batch)
        return batch.logits_indices[:, None].to(torch.float32)


def request(name: str, tokens: list[int], *block_ids: int) -> Request:
    (made,) = make_choices(ask(name, tokens), 0, frozenset())
    made.holding.table.extend([BlockId(i) for i in block_ids])
    return made


def forward(runner: ModelRunner, batch: InputBatch, plan: StepPlan) -> StepLogits:
    is_unchanged = batch.update(plan) is NO_CHANGE
    return runner.forward(runner.build(plan, is_unchanged=is_unchanged), plan)


def test_chunks_become_one_batch_without_padding() -> None:
    model, storage, batch = Recorder(), fake_storage(16, 4), InputBatch(4, 8)
    a, b, c = request("a", [10, 11, 12, 13, 14, 15], 3, 9), request("b", [20, 21, 22], 5), request("c", [30], 7)
    chunks = (
        ScheduledChunk(a, 5, 1, samples=True),
        ScheduledChunk(b, 0, 2, samples=False, num_prompt_logits=2),
        ScheduledChunk(c, 0, 1, samples=True),
    )
    logits = forward(ModelRunner(model, storage, batch), batch, StepPlan(chunks=chunks))
    (made,) = model.batches
    assert made.token_ids.tolist() == [15, 20, 21, 30]
    assert made.positions.tolist() == [5, 0, 1, 0]
    assert made.slot_mapping.tolist() == [9 * 4 + 1, 5 * 4, 5 * 4 + 1, 7 * 4]
    assert made.block_tables.tolist() == [[3, 9], [5, 0], [7, 0]]
    assert (made.query_start, made.seq_lens) == ((0, 1, 3, 4), (6, 2, 1))
    assert logits.sampling[:, 0].tolist() == [0, 3]
    assert logits.prompt is not None
    assert logits.prompt[:, 0].tolist() == [1, 2]
    assert (made.token_ids.dtype, made.block_tables.dtype) == (torch.int64, torch.int32)


def test_blocks_of_a_rows_former_owner_never_show() -> None:
    model, storage, batch = Recorder(), fake_storage(16, 4), InputBatch(4, 8)
    a, b, c = request("a", [1] * 12, 1, 2, 3), request("b", [1] * 3, 4), request("c", [1] * 8, 5, 6)
    runner = ModelRunner(model, storage, batch)
    former = (ScheduledChunk(a, 0, 1, samples=False), ScheduledChunk(c, 0, 1, samples=False))
    forward(runner, batch, StepPlan(chunks=former))
    chunks = (ScheduledChunk(b, 0, 3, samples=True), ScheduledChunk(c, 7, 1, samples=True))
    forward(runner, batch, StepPlan(chunks=chunks, left=(a.key,)))
    assert model.batches[1].block_tables.tolist() == [[4, 0], [5, 6]]


def test_decodes_alone_become_the_batch_they_are_in_company() -> None:
    model, storage, batch = Recorder(), fake_storage(16, 4), InputBatch(4, 8)
    a, b, c = request("a", [10, 11, 12, 13, 14, 15], 3, 9), request("b", [20, 21, 22], 5, 8), request("c", [7, 8], 2)
    decodes = (ScheduledChunk(a, 5, 1, samples=True), ScheduledChunk(b, 2, 1, samples=True))
    company = ScheduledChunk(c, 0, 2, samples=True)
    runner = ModelRunner(model, storage, batch)
    forward(runner, batch, StepPlan(chunks=decodes, is_decode=True))
    forward(runner, batch, StepPlan(chunks=(*decodes, company)))
    alone, together = model.batches
    assert alone.token_ids.tolist() == together.token_ids[:2].tolist() == [15, 22]
    assert alone.positions.tolist() == together.positions[:2].tolist()
    assert alone.slot_mapping.tolist() == together.slot_mapping[:2].tolist()
    assert [row[0] for row in alone.block_tables.tolist()] == [3, 5]
    assert alone.block_tables[0].tolist() == together.block_tables[0].tolist()
    assert (alone.query_start, alone.seq_lens) == (together.query_start[:3], together.seq_lens[:2])
    assert alone.logits_indices.tolist() == [0, 1]
    assert [getattr(alone, name).dtype for name in ("token_ids", "positions", "slot_mapping", "logits_indices")] == [
        torch.int64
    ] * 4
    assert alone.block_tables.dtype == torch.int32

import pytest
import torch

from benchmarks.roofline.cells import Cell, CellResult, layer_weights
from tests.support.tiny_model import tiny_config


def test_a_decode_cell_has_one_token_a_sequence_at_the_end_of_its_blocks() -> None:
    batch = Cell(num_seqs=2, length=20).batch()
    assert batch.positions.tolist() == [19, 19]
    assert batch.block_tables.tolist() == [[0, 1], [2, 3]]
    assert batch.slot_mapping.tolist() == [16 + 3, 48 + 3]
    assert batch.query_start == (0, 1, 2)
    assert batch.seq_lens == (20, 20)
    assert batch.logits_indices.tolist() == [0, 1]


def test_a_prefill_cell_wants_the_logits_of_its_last_token() -> None:
    batch = Cell(num_seqs=1, length=40, num_new_tokens=40).batch()
    assert torch.equal(batch.positions, torch.arange(40))
    assert torch.equal(batch.slot_mapping, torch.arange(40))
    assert batch.seq_lens == (40,)
    assert batch.logits_indices.tolist() == [39]


def test_a_verify_cell_wants_the_logits_of_every_row() -> None:
    cell = Cell(num_seqs=2, length=20, num_new_tokens=3, wants_all=True)
    batch = cell.batch()
    assert str(cell) == "verify 2 x 3 at 20"
    assert batch.positions.tolist() == [17, 18, 19, 17, 18, 19]
    assert batch.query_start == (0, 3, 6)
    assert batch.logits_indices.tolist() == [0, 1, 2, 3, 4, 5]
    assert cell.num_logits == 6


def test_the_floor_is_the_slower_of_reading_and_multiplying_round_by_round() -> None:
    result = CellResult(
        cell=Cell(num_seqs=1, length=8),
        dtype="float32",
        kernels="cpu",
        read_bytes=100,
        flops=1000,
        times_s=[30.0, 30.0, 30.0],
        bytes_per_s=[10.0, 20.0, 10.0],
        flops_per_s=[1000.0, 50.0, 1000.0],
    )
    assert result.floors_s() == [10.0, 20.0, 10.0]
    row = result.as_row()
    assert row["median_ratio"] == pytest.approx(3.0)
    assert row["floor_ms"] == pytest.approx(10_000.0)


def test_weights_of_layers_count_every_matrix_once() -> None:
    config = tiny_config(num_layers=1, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8)
    qkv_and_output = 32 * 32 + 2 * 16 * 32 + 32 * 32
    assert layer_weights(config) == qkv_and_output + 3 * 32 * 64

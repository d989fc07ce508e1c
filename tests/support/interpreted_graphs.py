"""Runs a tiny decoder with the Triton attention on the CPU, plainly and through `GraphedDecoder`, and compares.

A program of its own: Triton decides on its interpreter when it is first imported (TRITON_INTERPRET=1). The recorder
only keeps what it is given: a replay runs it again over the graph's own tensors.
"""

import json
import sys
from collections.abc import Callable

import torch

from common.engine.model.decode_graphs import GraphedDecoder, graph_sizes
from common.engine.model.forward import ForwardBatch
from common.engine.model.kernels import TorchKernels, TritonKernels
from common.engine.model.llama import assemble
from common.engine.model.weights import MemoryWeights
from tests.support.tiny_model import random_weights, tiny_config

BLOCK_SIZE, MAX_BLOCKS, MAX_NUM_SEQS = 4, 6, 5


class Rerun:
    """A `GraphRecorder` without a device; counts replays."""

    def __init__(self) -> None:
        self.num_replays = 0

    def record(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        run()

        def replay() -> torch.Tensor:
            self.num_replays += 1
            return run()

        return replay


def decodes(position: int, num_seqs: int, *, is_decode: bool = True) -> ForwardBatch:
    """Every sequence computes its token at `position`; sequence i holds blocks i, i + MAX_NUM_SEQS, ..."""
    num_blocks = position // BLOCK_SIZE + 1
    rows = torch.arange(num_seqs)
    tables = (rows[:, None] + torch.arange(num_blocks) * MAX_NUM_SEQS).to(torch.int32)
    return ForwardBatch(
        token_ids=(rows * 7 + position * 3 + 1) % 200,
        positions=torch.full((num_seqs,), position),
        slot_mapping=tables[:, -1].long() * BLOCK_SIZE + position % BLOCK_SIZE,
        block_tables=tables,
        query_start=tuple(range(num_seqs + 1)),
        seq_lens=(position + 1,) * num_seqs,
        logits_indices=rows,
        is_decode=is_decode,
    )


def main() -> int:
    torch.set_num_threads(1)
    config = tiny_config(num_layers=2)
    device = torch.device("cpu")
    kernels = TritonKernels(TorchKernels(device, torch.float32))
    source = MemoryWeights(random_weights(config))
    model = assemble(config, source, kernels, device=device, dtype=torch.float32).model
    shape = (MAX_BLOCKS * MAX_NUM_SEQS, 2, 2, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    plain, graphed, recorder = torch.zeros(shape), torch.zeros(shape), Rerun()
    decoder = GraphedDecoder(model, recorder, graphed, graph_sizes(MAX_NUM_SEQS), MAX_BLOCKS * BLOCK_SIZE)
    graphed.zero_()
    worst = 0.0
    for position, num_seqs in enumerate((5, 5, 3, 1, 3, 2, 1)):  # some stand still meanwhile; what they hold stays
        batch = decodes(position, num_seqs)
        difference = decoder.forward(batch, graphed) - model.forward(batch, plain)
        worst = max(worst, float(difference.abs().max()))
    num_replays = recorder.num_replays
    eager = decodes(7, 2, is_decode=False)
    difference = decoder.forward(eager, graphed) - model.forward(eager, plain)
    result = {
        "logits": max(worst, float(difference.abs().max())),
        "cache": float((graphed - plain).abs().max()),
        "replays": num_replays,
        "replays_of_others": recorder.num_replays - num_replays,
    }
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

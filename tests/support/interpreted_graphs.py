"""Runs a tiny decoder with the Triton attention on the CPU, plainly and through `GraphedDecoder`, and compares.

A program of its own: Triton decides on its interpreter when it is first imported (TRITON_INTERPRET=1). The recorder
only keeps what it is given: a replay runs it again over the graph's own tensors.
"""

import json
import sys
from collections.abc import Callable

import torch

from common.engine.model.config import ModelConfig
from common.engine.model.decode_graphs import GraphedDecoder, graph_sizes
from common.engine.model.flashinfer_attention import FlashInferAttention
from common.engine.model.forward import ForwardBatch
from common.engine.model.kernels import FlashInferKernels, KernelBackend, TorchKernels, TritonKernels
from common.engine.model.llama import assemble
from common.engine.model.triton_attention import TritonPagedAttention
from common.engine.model.weights import MemoryWeights
from tests.support.fake_flashinfer import FakeFence, FakePrefillWrapper
from tests.support.tiny_model import random_weights, tiny_config

BLOCK_SIZE, MAX_BLOCKS, MAX_NUM_SEQS = 4, 6, 5
CPU = torch.device("cpu")


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


def compare(kernels: KernelBackend, config: ModelConfig, dtype: torch.dtype) -> dict[str, float]:
    """Decode steps of a few sequences, plainly and through graphs, then one that is no plain decode."""
    source = MemoryWeights(random_weights(config))
    model = assemble(config, source, kernels, device=CPU, dtype=dtype).model
    shape = (MAX_BLOCKS * MAX_NUM_SEQS, 2, 2, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    plain, graphed, recorder = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype), Rerun()
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
    return {
        "logits": max(worst, float(difference.abs().max())),
        "cache": float((graphed - plain).abs().max()),
        "replays": num_replays,
        "replays_of_others": recorder.num_replays - num_replays,
    }


def main() -> int:
    torch.set_num_threads(1)
    config = tiny_config(num_layers=2)
    result = {"triton": compare(TritonKernels(TorchKernels(CPU, torch.float32)), config, torch.float32)}
    # FlashInfer's recorded steps are Triton's: here each side of the comparison is by another attention.
    config, wrapper = tiny_config(num_layers=2, head_dim=64), FakePrefillWrapper()
    attention = FlashInferAttention(config, wrapper, FakeFence([]), TritonPagedAttention(config))
    kernels = FlashInferKernels(TorchKernels(CPU, torch.float16), attention)
    result["flashinfer"] = {**compare(kernels, config, torch.float16), "plans": wrapper.num_plans}
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

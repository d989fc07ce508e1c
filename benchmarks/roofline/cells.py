"""One model's forwards, measured in turns with the machine's limits.

Owns: the batches, the count of bytes and flops, the floor. Does not know how results are shown.
"""

import statistics
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.roofline.machine import Machine
from common.engine.kv_cache.storage import KvCacheStorage, KvShape
from common.engine.model.config import ModelConfig
from common.engine.model.cpu_kernels.decoder import CpuDecoder
from common.engine.model.cpu_kernels.library import load_library
from common.engine.model.forward import ForwardBatch
from common.engine.model.loader import load_model

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A forward of `num_seqs` sequences that compute `num_new_tokens` each.

    length: tokens each sequence has afterwards. wants_all: logits of every row, as drafts that are verified need them;
    otherwise of each sequence's last.
    """

    num_seqs: int
    length: int
    num_new_tokens: int = 1
    wants_all: bool = False

    @property
    def num_tokens(self) -> int:
        """Rows of the batch."""
        return self.num_seqs * self.num_new_tokens

    @property
    def num_logits(self) -> int:
        """Rows that go through the head."""
        return self.num_tokens if self.wants_all else self.num_seqs

    def __str__(self) -> str:
        if self.num_new_tokens == self.length:
            return f"prefill {self.num_new_tokens}"
        name = "decode" if self.num_new_tokens == 1 else "verify"
        return f"{name} {self.num_seqs} x {self.num_new_tokens} at {self.length}"

    def batch(self) -> ForwardBatch:
        """The tokens, each sequence in blocks of its own."""
        per_seq = -(-self.length // BLOCK_SIZE)
        tables = torch.arange(self.num_seqs * per_seq, dtype=torch.int32).view(self.num_seqs, per_seq)
        positions = torch.arange(self.length - self.num_new_tokens, self.length).repeat(self.num_seqs)
        blocks = tables.long().gather(1, positions.view(self.num_seqs, -1) // BLOCK_SIZE).flatten()
        starts = range(0, self.num_tokens + 1, self.num_new_tokens)
        return ForwardBatch(
            token_ids=torch.arange(self.num_tokens) % 1000 + 100,
            positions=positions,
            slot_mapping=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
            block_tables=tables,
            query_start=tuple(starts),
            seq_lens=(self.length,) * self.num_seqs,
            logits_indices=torch.arange(self.num_tokens) if self.wants_all else torch.tensor(starts[1:]) - 1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """One cell's samples; the i-th of each list was taken in the i-th round.

    read_bytes: weights once, and each sequence's K and V. flops: two for each weight a row meets.
    """

    cell: Cell
    dtype: str
    kernels: str
    read_bytes: int
    flops: int
    times_s: list[float]
    bytes_per_s: list[float]
    flops_per_s: list[float]

    def floors_s(self) -> list[float]:
        """Each round's floor: reading at its bandwidth or multiplying at its rate, whichever takes longer."""
        limits = zip(self.bytes_per_s, self.flops_per_s, strict=True)
        return [max(self.read_bytes / read, self.flops / multiply) for read, multiply in limits]

    def as_row(self) -> dict[str, str | float]:
        """Everything shown."""
        floors_s = self.floors_s()
        ratios = [spent / floor for spent, floor in zip(self.times_s, floors_s, strict=True)]
        return {
            "dtype": self.dtype,
            "kernels": self.kernels,
            "forward": str(self.cell),
            "read_mb": self.read_bytes / 1e6,
            "gflop": self.flops / 1e9,
            "read_gbs": max(self.bytes_per_s) / 1e9,
            "gflops": max(self.flops_per_s) / 1e9,
            "floor_ms": min(floors_s) * 1e3,
            "best_ms": min(self.times_s) * 1e3,
            "median_ms": statistics.median(self.times_s) * 1e3,
            "median_ratio": statistics.median(ratios),
        }


class ModelBench:
    """A model of one dtype computed by one kind of kernels (`cpu` or `torch`)."""

    def __init__(self, path: Path, dtype: str, kernels: str, machine: Machine) -> None:
        self._machine = machine
        self._dtype = dtype
        self._kernels = kernels
        loaded = load_model(path, dtype=dtype, kernels=kernels, num_threads=machine.num_threads)
        self._config, self._model = loaded.config, loaded.model
        # int8 on the tile unit multiplies each weight with the two bfloat16 terms of an activation.
        on_tiles = dtype == "int8" and kernels == "cpu" and bool(load_library().pd_has_tiles())
        self._gemm_dtype = torch.bfloat16 if dtype == "bfloat16" or on_tiles else torch.float32
        self._products = 2 if on_tiles else 1

    def measure(self, cells: list[Cell], rounds: int) -> list[CellResult]:
        """Every cell once a round, each right after the two limits; the first round is thrown away.

        What is timed has just run untimed: a decode loop, too, finds in the caches what its last step left there.
        """
        num_blocks = max(cell.num_seqs * -(-cell.length // BLOCK_SIZE) for cell in cells)
        config = self._config
        shape = KvShape(
            num_layers=config.num_layers,
            block_size=BLOCK_SIZE,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=self._model.dtype,
        )
        storage = KvCacheStorage(num_blocks, shape, torch.device("cpu"))
        storage.take_memory()  # blocks nobody wrote are all the one zero page, which stays in a core's cache
        kv_cache = storage.tensor
        results = [self._empty(cell, kv_cache.element_size()) for cell in cells]
        batches = [cell.batch() for cell in cells]
        for round_number in range(rounds + 1):
            for result, batch in zip(results, batches, strict=True):
                read = self._machine.read_bytes_per_s(self._weight_bytes())
                multiply = self._machine.flops_per_s(self._gemm_dtype) / self._products
                self._model.forward(batch, kv_cache)
                start_s = self._machine.clock_s()
                self._model.forward(batch, kv_cache)
                spent_s = self._machine.clock_s() - start_s
                if round_number:
                    result.times_s.append(spent_s)
                    result.bytes_per_s.append(read)
                    result.flops_per_s.append(multiply)
        return results

    def _empty(self, cell: Cell, kv_element_bytes: int) -> CellResult:
        config = self._config
        token_bytes = config.num_layers * 2 * config.kv_size * kv_element_bytes
        return CellResult(
            cell=cell,
            dtype=self._dtype,
            kernels=self._kernels,
            read_bytes=self._weight_bytes() + cell.num_seqs * cell.length * token_bytes,
            flops=2
            * (layer_weights(config) * cell.num_tokens + config.vocab_size * config.hidden_size * cell.num_logits),
            times_s=[],
            bytes_per_s=[],
            flops_per_s=[],
        )

    def _weight_bytes(self) -> int:
        if isinstance(self._model, CpuDecoder):
            return self._model.weight_bytes
        per_weight = {"float32": 4, "bfloat16": 2, "int8": 1}[self._dtype]
        return per_weight * (layer_weights(self._config) + self._config.vocab_size * self._config.hidden_size)


def layer_weights(config: ModelConfig) -> int:
    """Weights of all layers' matrices."""
    attention = config.hidden_size * (2 * config.query_size + 2 * config.kv_size)
    return config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)

import random
from dataclasses import replace

import pytest
import torch

from common.engine.model.config import ModelConfig, ModelFamily
from common.engine.model.cpu_kernels.decoder import CpuDecoder, assemble_cpu, unsupported_reason
from common.engine.model.cpu_kernels.library import available
from common.engine.model.cpu_kernels.packed import WeightDtype
from common.engine.model.forward import ForwardBatch
from common.engine.model.kernels import TorchKernels
from common.engine.model.llama import LlamaModel, assemble
from common.engine.model.weights import CheckedWeights, MemoryWeights
from common.errors import Bug
from tests.support.tiny_model import random_weights, tiny_config

pytestmark = pytest.mark.skipif(not available(), reason="the kernels cannot be built here")

BLOCK_SIZE = 16
NUM_BLOCKS = 160
SHAPES: dict[str, dict[str, object]] = {
    "llama": {},
    "mistral": {"family": ModelFamily.MISTRAL, "sliding_window": 40, "head_dim": 24},
    "qwen2": {"family": ModelFamily.QWEN2, "qkv_bias": True, "tie_word_embeddings": False, "vocab_size": 301},
    "qwen3": {"family": ModelFamily.QWEN3, "qk_norm": True, "head_dim": 32, "num_heads": 6, "hidden_size": 64},
    "biased": {"output_bias": True, "mlp_bias": True, "num_kv_heads": 1, "num_layers": 3},
}


def cache(config: ModelConfig, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    shape = (NUM_BLOCKS, config.num_layers, 2, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    return torch.full(shape, float("nan"), dtype=dtype)


def decoder(
    config: ModelConfig, dtype: WeightDtype = "float32", num_threads: int = 2, *, tiles: bool | None = None
) -> CpuDecoder:
    source = MemoryWeights(random_weights(config))
    return assemble_cpu(config, source, weight_dtype=dtype, num_threads=num_threads, tiles=tiles)[0]


def torch_decoder(config: ModelConfig) -> LlamaModel:
    device, source = torch.device("cpu"), MemoryWeights(random_weights(config))
    return assemble(config, source, TorchKernels(device, torch.float32), device=device, dtype=torch.float32).model


class Sequences:
    """Prompts with scattered blocks; `batch` takes `(sequence, first, count)` chunks and wants every row's logits."""

    def __init__(self, config: ModelConfig, lengths: list[int], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = [torch.randint(0, config.vocab_size, (n,), generator=generator) for n in lengths]
        blocks = torch.randperm(NUM_BLOCKS, generator=generator).to(torch.int32)
        per_sequence = NUM_BLOCKS // len(lengths)
        self.tables = blocks[: per_sequence * len(lengths)].view(len(lengths), per_sequence)

    def batch(self, *chunks: tuple[int, int, int]) -> ForwardBatch:
        positions = [torch.arange(first, first + count) for _, first, count in chunks]
        starts = [0]
        for _, _, count in chunks:
            starts.append(starts[-1] + count)
        slots = [
            self.tables[index][where // BLOCK_SIZE].long() * BLOCK_SIZE + where % BLOCK_SIZE
            for (index, _, _), where in zip(chunks, positions, strict=True)
        ]
        return ForwardBatch(
            token_ids=torch.cat([self.tokens[index][first : first + count] for index, first, count in chunks]),
            positions=torch.cat(positions),
            slot_mapping=torch.cat(slots),
            block_tables=self.tables[[index for index, _, _ in chunks]],
            query_start=tuple(starts),
            seq_lens=tuple(first + count for _, first, count in chunks),
            logits_indices=torch.arange(starts[-1]),
        )


@pytest.mark.parametrize("name", SHAPES)
def test_the_compiled_decoder_computes_what_the_torch_one_does(name: str) -> None:
    config = tiny_config(**SHAPES[name])  # type: ignore[arg-type]  # named fields of the config
    sequences = Sequences(config, [70, 33])
    batch = sequences.batch((0, 0, 70), (1, 0, 33))
    mine, other = cache(config), cache(config)
    logits = decoder(config).forward(batch, mine)
    torch.testing.assert_close(logits, torch_decoder(config).forward(batch, other), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("name", ["qwen3", "mistral"])  # heads for the tile unit, where there is one, and others
def test_bfloat16_stays_near_float32_in_prefill_and_decode(name: str) -> None:
    config = tiny_config(**{**SHAPES[name], "sliding_window": 40})  # type: ignore[arg-type]  # fields of the config
    sequences, model = Sequences(config, [330, 50]), decoder(config, "bfloat16")
    batches = [
        sequences.batch((0, 0, 320), (1, 0, 37)),
        *(sequences.batch((0, 320 + i, 1), (1, 37 + i, 1)) for i in range(10)),
    ]
    mine, other = cache(config, torch.bfloat16), cache(config).nan_to_num_()  # torch reads unwritten slots, weight 0
    reference = torch_decoder(config)
    for batch in batches:
        expected = reference.forward(batch, other)
        error = model.forward(batch, mine) - expected
        assert error.norm() < 0.03 * expected.norm()


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "dtype", "tiles"),
    [
        ("llama", "float32", None),
        ("mistral", "float32", None),
        ("qwen2", "bfloat16", None),
        ("qwen3", "bfloat16", None),
        ("qwen3", "int8", None),  # heads for the tile unit, where there is one
        ("biased", "int8", None),  # and others
        ("qwen3", "int8", False),
    ],
)
def test_logits_do_not_depend_on_chunks_neighbours_or_threads(
    name: str, dtype: WeightDtype, tiles: bool | None, cache_dtype: torch.dtype
) -> None:
    config = tiny_config(**SHAPES[name])  # type: ignore[arg-type]  # named fields of the config
    lengths = [600, 310, 40]
    sequences, draw = Sequences(config, lengths), random.Random(0)
    decoders = [decoder(config, dtype, num_threads, tiles=tiles) for num_threads in (1, 2)]
    whole = decoders[0].forward(
        sequences.batch(*((i, 0, n) for i, n in enumerate(lengths))), cache(config, cache_dtype)
    )
    pieces: list[list[torch.Tensor]] = [[], [], []]
    done, kv = [0, 0, 0], cache(config, cache_dtype)
    while done != lengths:
        open_ones = [i for i in range(3) if done[i] < lengths[i] and draw.random() < 0.8]
        chunks = [(i, done[i], min(draw.choice([1, 1, 3, 6, 17, 90]), lengths[i] - done[i])) for i in open_ones]
        if not chunks:
            continue
        logits = draw.choice(decoders).forward(sequences.batch(*chunks), kv)
        for (i, _, count), rows in zip(chunks, logits.split([count for _, _, count in chunks]), strict=True):
            pieces[i].append(rows)
            done[i] += count
    assert torch.equal(torch.cat([torch.cat(rows) for rows in pieces]), whole)


def test_only_the_wanted_rows_come_back_in_the_order_asked_for() -> None:
    config = tiny_config()
    model, batch = decoder(config), Sequences(config, [50]).batch((0, 0, 50))
    every = model.forward(batch, cache(config))
    wanted = torch.tensor([49, 3, 3, 20])
    fewer = ForwardBatch(
        token_ids=batch.token_ids,
        positions=batch.positions,
        slot_mapping=batch.slot_mapping,
        block_tables=batch.block_tables,
        query_start=batch.query_start,
        seq_lens=batch.seq_lens,
        logits_indices=wanted,
    )
    assert torch.equal(model.forward(fewer, cache(config)), every[wanted])


@pytest.mark.parametrize(("dtype", "num_threads"), [("float32", 1), ("int8", 2), ("bfloat16", 3)])
def test_the_first_highest_token_of_each_row_is_said_to_who_asks(dtype: WeightDtype, num_threads: int) -> None:
    config = tiny_config(vocab_size=2500)
    weights = random_weights(config)
    head = weights["lm_head.weight"] if "lm_head.weight" in weights else weights["model.embed_tokens.weight"]
    head[1000:2000] = head[:1000]  # ties, within and across the threads' shares
    model = CpuDecoder(config, CheckedWeights(MemoryWeights(weights)), dtype, num_threads)
    batch, kv = Sequences(config, [50]).batch((0, 0, 50)), cache(config)
    found = torch.full((50,), -1)
    logits = model.forward(replace(batch, highest=found), kv)
    assert found.tolist() == logits.numpy().argmax(axis=1).tolist()
    weights["model.norm.weight"][0] = float("nan")
    broken = CpuDecoder(config, CheckedWeights(MemoryWeights(weights)), dtype, num_threads)
    broken.forward(replace(batch, highest=found), kv)
    assert found.tolist() == [-1] * 50


def test_a_chunk_that_wants_no_logits_still_fills_the_cache() -> None:
    config = tiny_config()
    model, sequences = decoder(config), Sequences(config, [40])
    batch = sequences.batch((0, 0, 40))
    quiet = ForwardBatch(
        token_ids=batch.token_ids,
        positions=batch.positions,
        slot_mapping=batch.slot_mapping,
        block_tables=batch.block_tables,
        query_start=batch.query_start,
        seq_lens=batch.seq_lens,
        logits_indices=torch.empty(0, dtype=torch.int64),
    )
    loud, silent = cache(config), cache(config)
    model.forward(batch, loud)
    assert model.forward(quiet, silent).shape == (0, config.vocab_size)
    torch.testing.assert_close(silent, loud, rtol=0, atol=0, equal_nan=True)


def test_a_strided_block_table_is_read_as_it_is_meant() -> None:
    config = tiny_config()
    model, sequences = decoder(config), Sequences(config, [30, 20])
    batch = sequences.batch((0, 0, 30), (1, 0, 20))
    wide = ForwardBatch(
        token_ids=batch.token_ids,
        positions=batch.positions,
        slot_mapping=batch.slot_mapping,
        block_tables=torch.cat([batch.block_tables, torch.full((2, 9), 7, dtype=torch.int32)], dim=1)[:, :2],
        query_start=batch.query_start,
        seq_lens=batch.seq_lens,
        logits_indices=batch.logits_indices,
    )
    assert torch.equal(model.forward(wide, cache(config)), model.forward(batch, cache(config)))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("token_ids", 5000, "token id"),
        ("positions", 1 << 20, "position"),
        ("slot_mapping", NUM_BLOCKS * BLOCK_SIZE, "slot"),
        ("slot_mapping", -1, "slot"),
        ("block_tables", NUM_BLOCKS, "block id"),
        ("logits_indices", 99, "logits index"),
    ],
)
def test_an_index_out_of_range_is_refused_before_anything_is_written(field: str, value: int, message: str) -> None:
    config = tiny_config()
    batch = Sequences(config, [20]).batch((0, 0, 20))
    kv = cache(config)
    getattr(batch, field).view(-1)[0] = value
    with pytest.raises(Bug, match=message):
        decoder(config).forward(batch, kv)
    assert kv.isnan().all()


def test_a_cache_of_another_shape_or_dtype_is_refused() -> None:
    config = tiny_config()
    batch = Sequences(config, [20]).batch((0, 0, 20))
    with pytest.raises(Bug, match="does not fit"):
        decoder(config).forward(batch, cache(config)[:, :1])
    with pytest.raises(Bug, match="float16"):
        decoder(config).forward(batch, cache(config, torch.float16))


def test_fingerprints_are_those_of_the_torch_decoder() -> None:
    config = tiny_config(qk_norm=True, qkv_bias=True, tie_word_embeddings=False)
    source, device = MemoryWeights(random_weights(config)), torch.device("cpu")
    plain = assemble(config, source, TorchKernels(device, torch.float32), device=device, dtype=torch.float32)
    for dtype in ("float32", "int8"):
        _, fingerprint = assemble_cpu(config, source, weight_dtype=dtype, num_threads=1)
        assert fingerprint == plain.tensors_fingerprint


def weights_on_the_grid(config: ModelConfig) -> MemoryWeights:
    """Matrices whose groups of 32 are scale times -127 to 127, as int8 keeps them exactly."""
    weights = random_weights(config)
    for name, weight in weights.items():
        if weight.dim() == 2:
            groups = weight.view(-1, 32)
            scale = (groups.abs().amax(dim=1, keepdim=True) / 127).half().float()
            levels = (groups / scale).round().clamp(-127, 127)
            levels[:, 0] = 127
            weights[name] = (levels * scale).view_as(weight)
    return MemoryWeights(weights)


def test_weights_on_the_grid_give_float32s_bits_by_vectors_and_its_logits_on_tiles() -> None:
    config = tiny_config(**SHAPES["qwen3"])  # type: ignore[arg-type]  # named fields of the config
    source, batch = weights_on_the_grid(config), Sequences(config, [300, 33]).batch((0, 0, 300), (1, 0, 33))
    full, vectors, best = (
        assemble_cpu(config, source, weight_dtype=dtype, num_threads=2, tiles=tiles)[0].forward(batch, cache(config))
        for dtype, tiles in (("float32", None), ("int8", False), ("int8", None))
    )
    assert torch.equal(vectors, full)
    torch.testing.assert_close(best, full, rtol=0, atol=2e-5 * full.abs().max().item())


def test_int8_reads_a_quarter_of_what_float32_does() -> None:
    config = tiny_config(hidden_size=128, num_heads=4, head_dim=32)
    assert decoder(config, "int8").weight_bytes < 0.32 * decoder(config).weight_bytes


def test_widths_the_kernels_cannot_stream_are_named() -> None:
    assert unsupported_reason(tiny_config()) is None
    reason = unsupported_reason(tiny_config(hidden_size=48, num_heads=6))
    assert reason == "hidden_size 48 is not a multiple of 32"

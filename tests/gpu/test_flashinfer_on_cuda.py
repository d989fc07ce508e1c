import inspect
from importlib.util import find_spec

import pytest
import torch

from common.engine.model.attention import TorchPagedAttention
from common.engine.model.decode_graphs import CudaRecorder, GraphedDecoder, graph_sizes
from common.engine.model.decoders import make_decoder
from common.engine.model.flashinfer_attention import FlashInferAttention, PagedPrefill
from common.engine.model.flashinfer_choice import InstalledFlashInfer, largest_error, open_flashinfer
from common.engine.model.weights import MemoryWeights
from tests.support.attention_cases import make_case
from tests.support.interpreted_graphs import BLOCK_SIZE, MAX_BLOCKS, MAX_NUM_SEQS, decodes
from tests.support.paged_forward import PagedDriver
from tests.support.tiny_model import random_weights, tiny_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
    pytest.mark.skipif(find_spec("flashinfer") is None, reason="flashinfer is not installed"),
    pytest.mark.timeout(600),  # the first run compiles kernels
    pytest.mark.filterwarnings("default"),  # what its packages warn of is not ours
]
CUDA = torch.device("cuda", 0)
PROMPT = list(b"A prompt of several blocks, so that chunks cut it everywhere.")
TOLERANCES = {torch.bfloat16: 5e-2, torch.float16: 1e-2}


def opened(config):
    library = InstalledFlashInfer().open(CUDA)
    return FlashInferAttention(config, library.wrapper, library.fence, recorded=TorchPagedAttention(config))


def on_device(batch, device=CUDA):
    tensors = {name: getattr(batch, name) for name in batch.__slots__}
    return type(batch)(**{n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in tensors.items()})


@pytest.mark.parametrize("method", ["plan", "run"])
def test_the_wrapper_takes_what_it_is_given(method):
    import flashinfer

    real = inspect.signature(getattr(flashinfer.BatchPrefillWithPagedKVCacheWrapper, method)).parameters
    ours = inspect.signature(getattr(PagedPrefill, method)).parameters

    positional = [name for name, taken in ours.items() if taken.kind is taken.POSITIONAL_OR_KEYWORD]
    assert list(real)[: len(positional)] == positional
    assert set(ours) <= set(real)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("heads", [(9, 3), (8, 8), (32, 8), (14, 2)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_attention_on_the_device_equals_plain_attention(dtype, window, heads, head_dim):
    config = tiny_config(num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, sliding_window=window)
    attention = opened(config)
    for sequences in ([(1300, 1), (7, 1), (3, 70), (0, 200), (20, 3)], [(800, 1), (15, 1)], [(0, 129)]):
        (query, key, value, layer, batch, cache), truth = make_case(config, sequences, seed=1)
        tensors = [tensor.to(CUDA, dtype) for tensor in (query, key, value, cache)]

        out = attention.attend(*tensors[:3], layer, on_device(batch), tensors[3])

        torch.testing.assert_close(out.float().cpu(), truth, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("block_size", [1, 5, 16, 64])
def test_blocks_of_any_size_are_pages(block_size):
    config = tiny_config(num_heads=9, num_kv_heads=3, head_dim=64)
    (query, key, value, layer, batch, cache), truth = make_case(config, [(130, 1), (3, 70)], 2, block_size)
    tensors = [tensor.to(CUDA, torch.float16) for tensor in (query, key, value, cache)]

    out = opened(config).attend(*tensors[:3], layer, on_device(batch), tensors[3])

    torch.testing.assert_close(out.float().cpu(), truth, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 4096])
def test_the_check_at_the_start_passes(dtype, window):
    config = tiny_config(num_heads=32, num_kv_heads=8, head_dim=128, sliding_window=window)

    attention = open_flashinfer(config, dtype, CUDA, TorchPagedAttention(config), InstalledFlashInfer())

    assert largest_error(attention, config, dtype, CUDA, [(300, 40), (5, 1)]) < 1


def test_steps_that_follow_each_other_without_a_wait_do_not_mix_up_their_plans():
    config = tiny_config(num_heads=9, num_kv_heads=3, head_dim=64)
    attention, cases = opened(config), []
    for seed in range(20):
        sequences = [(seed * 7, 1 + seed % 3)] * (1 + seed % 5)
        (query, key, value, layer, batch, cache), truth = make_case(config, sequences, seed)
        tensors = [tensor.to(CUDA, torch.float16) for tensor in (query, key, value, cache)]
        cases.append((tensors, layer, on_device(batch), truth))
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # the device is busy while all the plans are made

    outs = [attention.attend(*tensors[:3], layer, batch, tensors[3]) for tensors, layer, batch, _ in cases]

    for out, (*_, truth) in zip(outs, cases, strict=True):
        torch.testing.assert_close(out.float().cpu(), truth, atol=1e-2, rtol=1e-2)


def model_on_cuda(config, dtype="float16"):
    weights = MemoryWeights(random_weights(config))
    chosen = make_decoder(config, weights, kernels="flashinfer", dtype=dtype, device=CUDA, num_threads=0)
    assert chosen.kernels == "flashinfer"
    return chosen.model


def test_a_model_on_cuda_has_the_logits_it_has_on_the_cpu():
    config = tiny_config(qk_norm=True, head_dim=64)
    weights = MemoryWeights(random_weights(config))
    on_cpu = make_decoder(
        config, weights, kernels="torch", dtype="float32", device=torch.device("cpu"), num_threads=0
    ).model
    expected = PagedDriver(on_cpu, config, num_blocks=16).run(PROMPT, [])
    on_cuda = model_on_cuda(config)

    for chunks in ([], [5, 1, 1, 20]):
        driver = PagedDriver(on_cuda, config, num_blocks=16, dtype=torch.float16, device="cuda")
        torch.testing.assert_close(driver.run(PROMPT, chunks).cpu(), expected, atol=5e-2, rtol=5e-2)


def test_a_decode_that_triton_recorded_has_the_logits_of_flashinfers_plain_one():
    config = tiny_config(head_dim=64)
    model = model_on_cuda(config)
    shape = (MAX_BLOCKS * MAX_NUM_SEQS, config.num_layers, 2, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    plain, graphed = (torch.zeros(shape, dtype=model.dtype, device=CUDA) for _ in range(2))
    decoder = GraphedDecoder(model, CudaRecorder(CUDA), graphed, graph_sizes(MAX_NUM_SEQS), MAX_BLOCKS * BLOCK_SIZE)
    graphed.zero_()
    for position, num_seqs in enumerate((5, 5, 3, 1, 3, 2, 1)):
        batch = on_device(decodes(position, num_seqs))
        torch.testing.assert_close(decoder.forward(batch, graphed), model.forward(batch, plain), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(graphed, plain, atol=2e-2, rtol=2e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has no second CUDA device")
@pytest.mark.parametrize("kernels", ["flashinfer", "triton"])
def test_a_device_that_is_not_the_current_one_computes_and_records(kernels):
    config, device = tiny_config(head_dim=64), torch.device("cuda", 1)
    weights = MemoryWeights(random_weights(config))
    model = make_decoder(config, weights, kernels=kernels, dtype="float16", device=device, num_threads=0).model
    shape = (MAX_BLOCKS * MAX_NUM_SEQS, config.num_layers, 2, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    plain, graphed = (torch.zeros(shape, dtype=model.dtype, device=device) for _ in range(2))
    decoder = GraphedDecoder(model, CudaRecorder(device), graphed, graph_sizes(MAX_NUM_SEQS), MAX_BLOCKS * BLOCK_SIZE)
    graphed.zero_()
    batch = on_device(decodes(0, 3), device)

    torch.testing.assert_close(decoder.forward(batch, graphed), model.forward(batch, plain), atol=2e-2, rtol=2e-2)

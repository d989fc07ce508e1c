import pytest
import torch

from common.engine.model.decoders import make_decoder
from common.engine.model.triton_attention import TritonPagedAttention
from common.engine.model.weights import MemoryWeights
from tests.support.attention_cases import make_case
from tests.support.paged_forward import PagedDriver
from tests.support.tiny_model import random_weights, tiny_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]
PROMPT = list(b"A prompt of several blocks, so that chunks cut it everywhere.")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2), (torch.float16, 1e-2)])
@pytest.mark.parametrize("window", [None, 700])
def test_attention_on_the_device_equals_plain_attention(dtype, tolerance, window):
    config = tiny_config(num_heads=8, num_kv_heads=2, head_dim=64, sliding_window=window)
    (query, key, value, layer, batch, cache), truth = make_case(config, [(1300, 1), (7, 1), (3, 70), (0, 200)], seed=1)
    on_device = {name: getattr(batch, name) for name in batch.__slots__}
    on_device = {n: v.cuda() if isinstance(v, torch.Tensor) else v for n, v in on_device.items()}
    tensors = [tensor.to("cuda", dtype) for tensor in (query, key, value, cache)]

    out = TritonPagedAttention(config).attend(*tensors[:3], layer, type(batch)(**on_device), tensors[3])

    torch.testing.assert_close(out.float().cpu(), truth, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kernels", ["triton", "torch"])
def test_a_model_on_cuda_has_the_logits_it_has_on_the_cpu(kernels):
    config = tiny_config(qk_norm=True)
    weights = MemoryWeights(random_weights(config))
    on_cpu, on_cuda = (
        make_decoder(config, weights, kernels=name, dtype="float32", device=torch.device(device), num_threads=0).model
        for name, device in (("torch", "cpu"), (kernels, "cuda"))
    )
    expected = PagedDriver(on_cpu, config, num_blocks=16).run(PROMPT, [])

    for chunks in ([], [5, 1, 1, 20]):
        logits = PagedDriver(on_cuda, config, num_blocks=16, device="cuda").run(PROMPT, chunks)
        torch.testing.assert_close(logits.cpu(), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_recorded_decode_has_the_logits_of_a_plain_one(dtype):
    from common.engine.model.decode_graphs import CudaRecorder, GraphedDecoder, graph_sizes
    from tests.support.interpreted_graphs import BLOCK_SIZE, MAX_BLOCKS, MAX_NUM_SEQS, decodes

    config, device = tiny_config(head_dim=64), torch.device("cuda")
    weights = MemoryWeights(random_weights(config))
    model = make_decoder(config, weights, kernels="triton", dtype=dtype, device=device, num_threads=0).model
    shape = (MAX_BLOCKS * MAX_NUM_SEQS, config.num_layers, 2, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    plain, graphed = (torch.zeros(shape, dtype=model.dtype, device=device) for _ in range(2))
    decoder = GraphedDecoder(model, CudaRecorder(device), graphed, graph_sizes(MAX_NUM_SEQS), MAX_BLOCKS * BLOCK_SIZE)
    graphed.zero_()
    for position, num_seqs in enumerate((5, 5, 3, 1, 3, 2, 1)):
        batch = decodes(position, num_seqs)
        tensors = {name: getattr(batch, name) for name in batch.__slots__}
        batch = type(batch)(**{n: v.cuda() if isinstance(v, torch.Tensor) else v for n, v in tensors.items()})
        expected = model.forward(batch, plain)
        torch.testing.assert_close(decoder.forward(batch, graphed), expected, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(graphed, plain, atol=1e-2, rtol=1e-2)

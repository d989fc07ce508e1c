import pytest
import torch

from common.engine.model.config import Llama3RopeScaling, RopeConfig
from common.engine.model.kernels import TorchKernels
from common.engine.model.llama import assemble
from common.engine.model.weights import MemoryWeights
from common.errors import StartupError
from tests.support.paged_forward import PagedDriver
from tests.support.tiny_model import random_weights, tiny_config, tiny_model

CPU = torch.device("cpu")
PROMPT = list(b"A prompt of several blocks, so that chunks cut it everywhere.")
VARIANTS = {
    "llama": {},
    "biases and norms": {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "qk_norm": True},
    "untied": {"tie_word_embeddings": False},
    "window": {"sliding_window": 7},
    "llama3 rope": {
        "rope": RopeConfig(
            llama3=Llama3RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64)
        )
    },
}


def driver_of(loaded, block_size=4):
    return PagedDriver(loaded.model, loaded.config, num_blocks=64, block_size=block_size)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("chunks", [[1] * 60, [5, 1, 1, 16], [4, 4, 8]], ids=["one by one", "mixed", "block by block"])
def test_a_prompt_in_chunks_has_the_logits_of_the_whole_prompt(changes, chunks):
    driver = driver_of(tiny_model(**changes))

    torch.testing.assert_close(driver.run(PROMPT, chunks), driver.run(PROMPT, []), atol=1e-4, rtol=1e-4)


def test_neighbours_in_the_batch_do_not_change_a_sequence():
    loaded = tiny_model()
    alone = driver_of(loaded).run(PROMPT, [20, 1])
    driver = driver_of(loaded)
    mine, other, third = driver.new_sequence(), driver.new_sequence(), driver.new_sequence()

    parts = [driver.step([(other, PROMPT[7:40]), (mine, PROMPT[:20])])[1]]
    parts.append(driver.step([(mine, PROMPT[20:21]), (third, PROMPT[:9]), (other, PROMPT[40:41])])[0])
    parts.append(driver.step([(third, PROMPT[9:10]), (mine, PROMPT[21:])])[1])

    torch.testing.assert_close(torch.cat(parts), alone, atol=1e-4, rtol=1e-4)


def test_logits_are_float32_for_the_wanted_rows_only():
    loaded = tiny_model()
    driver = driver_of(loaded)

    (logits,) = driver.step([(driver.new_sequence(), PROMPT)])

    assert logits.dtype == torch.float32
    assert logits.shape == (len(PROMPT), loaded.config.vocab_size)


def test_equal_arguments_make_equal_models_and_fingerprints():
    assert tiny_model().fingerprint == tiny_model().fingerprint
    assert tiny_model().fingerprint != tiny_model(seed=1).fingerprint


@pytest.mark.parametrize("changes", [{"rope": RopeConfig(theta=5e4)}, {"sliding_window": 7}, {"rms_norm_eps": 1e-6}])
def test_constants_that_change_the_kv_change_the_fingerprint(changes):
    assert tiny_model(**changes).weights_fingerprint != tiny_model().weights_fingerprint


def test_int8_weights_stay_close_to_float32():
    config = tiny_config()
    weights = MemoryWeights(random_weights(config))
    exact, rounded = (
        assemble(config, weights, TorchKernels(CPU, torch.float32, int8=int8), device=CPU, dtype=torch.float32).model
        for int8 in (False, True)
    )
    logits = [PagedDriver(model, config, num_blocks=64).run(PROMPT, []) for model in (exact, rounded)]

    assert 0 < (logits[0] - logits[1]).abs().max() < 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_stay_close_to_float32(dtype):
    config = tiny_config(qk_norm=True)
    weights = MemoryWeights(random_weights(config))
    exact, rounded = (
        assemble(config, weights, TorchKernels(CPU, kind), device=CPU, dtype=kind).model
        for kind in (torch.float32, dtype)
    )
    expected = PagedDriver(exact, config, num_blocks=64).run(PROMPT, [])
    got = PagedDriver(rounded, config, num_blocks=64, dtype=dtype).run(PROMPT, [9])

    assert got.dtype == torch.float32
    assert (got - expected).abs().max() < 0.2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, "tensor model.layers.1.mlp.up_proj.weight is missing"),
        (
            {"model.layers.0.self_attn.k_proj.weight": torch.zeros(8, 32)},
            r"model.layers.0.self_attn.k_proj.weight has shape \[8, 32\], the config says \[16, 32\]",
        ),
    ],
    ids=["missing", "wrong shape"],
)
def test_weights_that_do_not_fit_the_config_stop_the_start_by_name(change, message):
    config = tiny_config()
    tensors = {**random_weights(config), **change}
    source = MemoryWeights({name: tensor for name, tensor in tensors.items() if tensor is not None})

    with pytest.raises(StartupError, match=message):
        assemble(config, source, TorchKernels(CPU, torch.float32), device=CPU, dtype=torch.float32)

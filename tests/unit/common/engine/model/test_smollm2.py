"""The default model itself: our logits and token ids beside transformers', from the folder we export."""

import itertools
from pathlib import Path

import pytest
import torch
import transformers

from common.clock import ManualClock
from common.engine.chat_template import ChatTemplate
from common.engine.model.export import export_checkpoint
from common.engine.model.loader import load_model, read_checkpoint
from tests.support.paged_forward import PagedDriver

REPOSITORY = Path(__file__).parents[5]
MODEL = REPOSITORY / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT_LENGTHS = (1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 127, 200, 257, 512, 1500)
TOLERANCE = 1e-3
LAST = 64  # positions compared at the end of long prompts; all of shorter ones
TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces\n\n\nand\ttabs \r\n",
    "It's 2024-11-30, 3.14159 and 1,000,000 times; I'd've 12345678901234567890",
    "Zürich naïve Straße 東京 ภาษาไทย العربية עברית 한국어 🙂👩‍👩‍👧 e\u0301",
    "<|im_start|>user\nWhat?<|im_end|>\n<|endoftext|>not special: <|im_middle|>",
    "def f(x):\n    return {'a': [1, 2], \"b\": x ** 2}  # commented\n",
    "٣ ² ½ Ⅷ 1st",
    "\u00a0\u200b\ufeff\u3000",
    "a" * 300,
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.exists(), reason=f"the default model is not at {MODEL} (make models fetches it)"),
]


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread():
    """Two that wait for each other on a busy machine take many times as long as one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint():
    return read_checkpoint(MODEL)


@pytest.fixture(scope="module")
def exported(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2")
    export_checkpoint(checkpoint, folder)
    return folder


@pytest.fixture(scope="module")
def their_tokenizer(exported):
    return transformers.AutoTokenizer.from_pretrained(exported)


@pytest.fixture(scope="module")
def prompts(checkpoint):
    """20 prompts of different text and the wanted lengths."""
    text = "\n".join(path.read_text() for path in sorted((REPOSITORY / "common").glob("*.py")))
    token_ids = checkpoint.tokenizer.encode(text)
    starts = itertools.accumulate((0, *PROMPT_LENGTHS[:-1]), lambda start, length: start + length // 4)
    return [token_ids[start : start + length] for start, length in zip(starts, PROMPT_LENGTHS, strict=True)]


@pytest.fixture(scope="module")
def reference_logits(exported, prompts):
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model(torch.tensor([prompt]), logits_to_keep=LAST).logits[0] for prompt in prompts]


@pytest.mark.parametrize(("kernels", "longest"), [("auto", 1500), ("torch", 100)])
def test_logits_equal_transformers_whole_and_in_chunks(prompts, reference_logits, kernels, longest):
    loaded = load_model(MODEL, kernels=kernels)
    driver = PagedDriver(loaded.model, loaded.config, num_blocks=110)

    assert [len(prompt) for prompt in prompts] == list(PROMPT_LENGTHS)
    for prompt, expected in zip(prompts, reference_logits, strict=True):
        if len(prompt) > longest:
            continue
        for chunks in ([], [1, 6, 16, 100, 300, 512]):
            difference = (driver.run(prompt, chunks, last=LAST) - expected).abs().max()
            assert difference < TOLERANCE, f"{len(prompt)} tokens, chunks {chunks}"


@pytest.mark.parametrize(
    ("kv_dtype", "tolerance", "divergence"), [(torch.float32, TOLERANCE, 1e-6), (torch.bfloat16, 0.5, 5e-3)]
)
def test_int8_keeps_this_file_and_computes_float32s_logits_from_it(
    prompts, reference_logits, kv_dtype, tolerance, divergence
):
    loaded = load_model(MODEL, dtype="int8")
    driver = PagedDriver(loaded.model, loaded.config, num_blocks=110, dtype=kv_dtype)

    for prompt, expected in zip(prompts, reference_logits, strict=True):
        if len(prompt) > 257:
            continue
        whole, pieces = driver.run(prompt, [], last=LAST), driver.run(prompt, [1, 6, 16, 100], last=LAST)
        assert torch.equal(whole, pieces)
        assert (whole - expected).abs().max() < tolerance
        ours, theirs = whole.log_softmax(-1), expected.log_softmax(-1)
        assert (theirs.exp() * (theirs - ours)).sum(-1).max() < divergence


def test_token_ids_and_text_equal_the_exported_tokenizer_as_transformers_reads_it(checkpoint, their_tokenizer):
    ours, theirs = checkpoint.tokenizer, their_tokenizer
    for text in TEXTS:
        ids = ours.encode(text)

        assert ids == theirs(text).input_ids
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids) == text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_prompts_equal_those_transformers_renders(checkpoint, their_tokenizer):
    template = ChatTemplate(checkpoint.chat_template, checkpoint.special_tokens, ManualClock())
    messages = [
        {"role": "user", "content": "Wie heißt du? <b>&amp;</b>"},
        {"role": "assistant", "content": "SmolLM"},
        {"role": "user", "content": "2 + 2 = ?\n"},
    ]
    for conversation in (messages, [{"role": "system", "content": "Be brief."}, *messages]):
        assert template.render(conversation) == their_tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True
        )


def test_the_end_of_a_turn_is_what_the_file_names(checkpoint):
    assert checkpoint.config.eos_token_ids == {checkpoint.tokenizer.vocab()["<|im_end|>"]} == {2}
    assert checkpoint.tokenizer.special_token_ids == frozenset(range(17))
    assert checkpoint.special_tokens["bos_token"] == "<|im_start|>"

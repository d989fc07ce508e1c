"""docs/sampling.md: its presets are valid and every test it names exists."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from common.engine.sampling.raw import RawSampling, SamplingContext
from common.engine.sampling.validation import normalise
from tests.support.byte_tokenizer import ByteTokenizer

ROOT = next(parent for parent in Path(__file__).parents if (parent / "pyproject.toml").is_file())
PAGE = (ROOT / "docs" / "sampling.md").read_text()
PRESETS = re.findall(r"^(\w+): [^\n]*\n```json\n(.*?)\n```", PAGE, re.MULTILINE | re.DOTALL)
NAMED_TESTS = sorted(set(re.findall(r"\*(test_\w+)\*", PAGE)))
NOT_SAMPLING = {"response_format", "top_logprobs"}


@pytest.mark.parametrize(("name", "text"), PRESETS)
def test_every_preset_of_the_page_is_valid(name, text):
    body = json.loads(text)
    if body.get("logprobs") is True:
        body["logprobs"] = body["top_logprobs"]
    known = {field.name for field in fields(RawSampling)} | NOT_SAMPLING
    assert set(body) <= known
    raw = RawSampling(**{key: value for key, value in body.items() if key not in NOT_SAMPLING})
    context = SamplingContext(tokenizer=ByteTokenizer(), vocab_size=261, max_model_len_tokens=1024)
    assert normalise(raw, context, 10).temperature == body["temperature"]


def test_the_page_has_the_six_presets():
    assert [name for name, _ in PRESETS] == ["Code", "Creative", "JSON", "RAG", "Chat", "Translation"]


def test_every_test_the_page_names_exists():
    written = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name in NAMED_TESTS if f"def {name}(" not in written] == []
    assert len(NAMED_TESTS) > 40

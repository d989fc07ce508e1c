"""`on_inexact: validate`: what could not be enforced is checked at the end, and the answer says so."""

import pytest

from common.serving.shaping.reasoning import reasoning_tags
from tests.support.serving_rig import Answered, serving_rig

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ONE_OF = {"structured_outputs": {"json": {"oneOf": [{"type": "object"}, {"type": "string"}]}}}
EXACT = {"structured_outputs": {"json": {"type": "object"}}}
ASKS = [(CHAT, {"messages": [{"role": "user", "content": "hi"}]}), (COMPLETIONS, {"prompt": "hi", "max_tokens": 50})]


def check_of(answer: Answered, stream: bool) -> dict | None:
    choices = [c for e in answer.events if e != "[DONE]" for c in e["choices"]] if stream else answer.json["choices"]
    assert all("constraint_check" not in choice for choice in choices[:-1])
    return choices[-1].get("constraint_check")


@pytest.mark.parametrize(("path", "body"), ASKS)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_last_piece_says_what_was_not_enforced_and_how_the_text_fared(path: str, body: dict, stream: bool):
    async with serving_rig(checks=True, reasoning=reasoning_tags("think")) as rig:
        rig.engine.text = "<think>x</think>{}"
        good = await rig.post(path, {**body, **ONE_OF, "stream": stream})
        assert check_of(good, stream) == {"unenforced": ["oneOf"], "valid": True, "reason": None}
        rig.engine.text = "[]"
        bad = await rig.post(path, {**body, **ONE_OF, "stream": stream})
        assert check_of(bad, stream) == {"unenforced": ["oneOf"], "valid": False, "reason": "[] is no object"}


@pytest.mark.parametrize("fields", [EXACT, {}, {**ONE_OF, "max_tokens": 1}])
async def test_nothing_is_said_where_all_was_enforced_or_the_text_was_cut(fields: dict):
    async with serving_rig(checks=True) as rig:
        assert check_of(await rig.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 50, **fields}), False) is None


async def test_without_the_setting_nothing_is_checked():
    async with serving_rig() as rig:
        assert check_of(await rig.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 50, **ONE_OF}), False) is None

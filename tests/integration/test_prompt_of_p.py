"""D decodes on the prompt that P rendered, whatever D's own template would have said (cases: I8).

P and D live in different years, and the template throws dice: two renderings are never equal.
"""

from typing import Any

import pytest

from tests.support.fake_model import continuation
from tests.support.pd_rig import YEARS, PdRig, pd_rig

TEMPLATE = (
    "{{ strftime_now('%Y') }} {{ range(100000) | random }} "
    "{% if tools %}[{{ tools[0].function.name }}]{% endif %}{{ messages[0].content }}"
    "{% if add_generation_prompt %} Answer:{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
P_YEAR, D_YEAR = str(YEARS["prefill"]), str(YEARS["decode"])


async def ask(rig: PdRig, url: str, fields: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Tokens that were decoded on, and those that came of it."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hello there"}],
        "max_tokens": 6,
        "temperature": 0,
        "return_token_ids": True,
        **fields,
    }
    async with rig.session.post(f"{url}/v1/chat/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
    return answer["prompt_token_ids"], answer["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, " hello there Answer:"),
        ({"add_generation_prompt": False}, " hello there"),
        ({"tools": [TOOL], "tool_choice": "none"}, " [look_up]hello there Answer:"),
        ({"tools": [TOOL], "tool_choice": "none", "add_generation_prompt": False}, " [look_up]hello there"),
    ],
)
async def test_a_template_with_a_date_and_dice_is_rendered_once_by_p_and_d_decodes_on_that(
    fields: dict[str, Any], end: str
) -> None:
    async with pd_rig(prefill_s=0.0, compile_s=0.0, template=TEMPLATE) as rig:
        prompt, output = await ask(rig, rig.url, fields)
        assert (bytes(prompt[:4]).decode(), bytes(prompt).decode()[-len(end) :]) == (P_YEAR, end)
        assert output == continuation(prompt, 6)
        alone, _ = await ask(rig, rig.d.url, fields)  # the same request, rendered by D
        assert (bytes(alone[:4]).decode(), bytes(alone).decode()[-len(end) :]) == (D_YEAR, end)

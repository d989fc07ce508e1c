"""Our engines behind routers that are not ours: a plain relay and vllm-router drive them by vLLM's dialect."""

from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import pytest

from tests.support.peers import peers, plain_relay, vllm_router
from tests.support.trio import Trio, post_json

pytestmark = [pytest.mark.peers, pytest.mark.slow]

ROUTERS = {"plain relay": plain_relay, "vllm-router": vllm_router}
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}, "number": {"type": "integer", "maximum": 9}},
    "required": ["colour", "number"],
    "additionalProperties": False,
}
BASE: dict[str, Any] = {"model": "smollm2", "temperature": 0, "max_tokens": 32}


@pytest.fixture(scope="module", params=sorted(ROUTERS))
def router(request: pytest.FixtureRequest, trio: Trio, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    start = ROUTERS[request.param]
    with start(peers(), trio.url("prefill"), trio.url("decode"), tmp_path_factory.mktemp("router")) as url:
        yield url


def chat(url: str, question: str, **fields: Any) -> str:
    body = {**BASE, "messages": [{"role": "user", "content": question}], **fields}
    status, answer, _ = post_json(url + "/v1/chat/completions", body)
    assert status == 200, answer
    return str(answer["choices"][0]["message"]["content"])


def test_free_text_is_what_d_says_alone_and_its_prompt_was_pulled(router: str, trio: Trio) -> None:
    question = f"Name three rivers. {router}"
    pulled = trio.total("decode", "pd_kv_pull_bytes_total")
    text = chat(router, question)
    assert trio.total("decode", "pd_kv_pull_bytes_total") > pulled
    assert text == chat(trio.url("prefill"), question)


def test_a_schema_is_obeyed(router: str) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "pick", "schema": SCHEMA, "strict": True}}
    text = chat(router, "Pick a colour and a number, in JSON.", response_format=wanted)
    jsonschema.validate(msgspec.json.decode(text.encode()), SCHEMA)


def test_a_choice_is_obeyed(router: str) -> None:
    assert chat(router, "Tea or coffee?", structured_outputs={"choice": ["tea", "coffee"]}) in ("tea", "coffee")


def test_no_lease_is_left_behind(router: str, trio: Trio) -> None:
    chat(router, f"One more word. {router}", max_tokens=2)
    assert trio.total("prefill", "pd_leases_held") == 0

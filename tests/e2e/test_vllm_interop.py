"""pd-proxy (`dialect: vllm`) in front of a stock vLLM pair: strip, warm-up prepare, and answers as they should be."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import jsonschema
import msgspec
import pytest

from common.clock import SystemClock
from common.openai.sse import SseParser
from proxy.config import FleetConfig, ProxyConfig
from proxy.server import running
from tests.support.peers import Recorder, peers, vllm_pair

pytestmark = [pytest.mark.peers, pytest.mark.slow, pytest.mark.timeout(1800)]

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Pick a colour and a number below ten. Answer in JSON."}]
BASE: dict[str, Any] = {"model": "smollm2", "messages": MESSAGES, "temperature": 0, "max_tokens": 48}
CONSTRAINT_FIELDS = ("response_format", "structured_outputs")


@dataclass
class Front:
    """A proxy whose legs to vLLM are recorded."""

    url: str
    p: Recorder
    d: Recorder
    session: aiohttp.ClientSession

    async def post(self, body: dict[str, Any]) -> tuple[int, bytes]:
        async with self.session.post(self.url + CHAT, json=body) as response:
            return response.status, await response.read()

    async def text(self, body: dict[str, Any]) -> str:
        """What an answer says, streamed or not."""
        status, answer = await self.post(body)
        assert status == 200, answer
        if not body.get("stream"):
            return msgspec.json.decode(answer)["choices"][0]["message"]["content"]
        payloads = SseParser().push(answer)
        assert payloads[-1] == b"[DONE]"
        chunks = [msgspec.json.decode(payload) for payload in payloads[:-1]]
        return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    with vllm_pair(peers(), tmp_path_factory.mktemp("vllm")) as urls:
        yield urls


@asynccontextmanager
async def proxy_in_front(pair: tuple[str, str], **settings: Any) -> AsyncIterator[Front]:
    p, d = Recorder(pair[0]), Recorder(pair[1])
    serving_p, serving_d = p.serve(), d.serve()
    try:
        fleet = msgspec.convert({"prefill": [await anext(serving_p)], "decode": [await anext(serving_d)]}, FleetConfig)
        config = msgspec.convert({"port": 0, "dialect": "vllm", "drain_s": 1.0, **settings}, ProxyConfig)
        config = msgspec.structs.replace(config, fleet=fleet)
        async with running(config, SystemClock()) as proxy, aiohttp.ClientSession() as session:
            await proxy.services.fleet.wait_ready()
            yield Front(f"http://127.0.0.1:{proxy.port}", p, d, session)
    finally:
        await serving_p.aclose()
        await serving_d.aclose()


@pytest.fixture
async def front(pair: tuple[str, str]) -> AsyncIterator[Front]:
    async with proxy_in_front(pair, warm_up_min_bytes=0) as front:
        yield front


def schema_called(name: str) -> dict[str, Any]:
    """A schema that nobody has seen: `name` is one of its properties."""
    return {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green", "blue"]}, name: {"type": "integer", "maximum": 9}},
        "required": ["colour", name],
        "additionalProperties": False,
    }


def asking_for(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "pick", "schema": schema}}}


@pytest.mark.parametrize("stream", [False, True])
async def test_free_text_over_the_pair_is_what_vllm_says_alone(
    front: Front, pair: tuple[str, str], stream: bool
) -> None:
    body = {**BASE, "max_tokens": 12, "messages": [{"role": "user", "content": f"Why is the sky blue? {stream}"}]}
    async with front.session.post(pair[1] + CHAT, json=body) as response:
        alone = (await response.json())["choices"][0]["message"]["content"]
    assert await front.text({**body, "stream": stream}) == alone
    asked_of_p = front.p.bodies[-1]
    assert (asked_of_p["max_tokens"], asked_of_p["kv_transfer_params"]["do_remote_decode"]) == (1, True)
    assert front.d.bodies[-1]["kv_transfer_params"]["remote_engine_id"]
    assert len(front.d.bodies) == 1  # nothing to warm up


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cold_schema_is_obeyed_while_p_sees_none_and_d_is_warmed_up_with_it(front: Front, stream: bool) -> None:
    schema = schema_called(f"number_{'streamed' if stream else 'whole'}")
    text = await front.text({**BASE, **asking_for(schema), "stream": stream})
    jsonschema.validate(msgspec.json.decode(text), schema)
    assert all(field not in body for body in front.p.bodies for field in CONSTRAINT_FIELDS)
    warm_up, decode = sorted(front.d.bodies, key=lambda body: "kv_transfer_params" in body)
    assert warm_up["max_tokens"] == 1
    assert "messages" not in warm_up
    assert warm_up["response_format"] == decode["response_format"] == asking_for(schema)["response_format"]
    assert decode["kv_transfer_params"]["do_remote_prefill"] is True
    again = await front.text({**BASE, **asking_for(schema), "stream": stream})
    assert again == text
    assert len(front.d.bodies) == 3  # D knows it by now


async def test_a_choice_is_obeyed(front: Front) -> None:
    assert await front.text({**BASE, "structured_outputs": {"choice": ["umber", "ochre"]}}) in ("umber", "ochre")


async def test_a_forced_tool_is_answered_as_by_vllm_alone_and_p_is_shown_the_tool_only(
    front: Front, pair: tuple[str, str]
) -> None:
    schema = schema_called("layers")
    tools = {"tools": [{"type": "function", "function": {"name": "paint", "parameters": schema}}]}
    forced = {"tool_choice": {"type": "function", "function": {"name": "paint"}}}
    async with front.session.post(pair[1] + CHAT, json={**BASE, **tools, **forced}) as response:
        alone = (await response.json())["choices"][0]["message"]
    status, answer = await front.post({**BASE, **tools, **forced})
    assert status == 200, answer
    message = msgspec.json.decode(answer)["choices"][0]["message"]
    assert message["content"] == alone["content"]
    calls = [[call["function"] for call in said.get("tool_calls") or ()] for said in (message, alone)]
    assert calls[0] == calls[1]
    assert "tool_choice" not in front.p.bodies[-1]
    assert front.p.bodies[-1]["tools"] == tools["tools"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_constraint_that_vllm_refuses_is_a_400_with_its_reason_and_the_next_request_is_fine(
    front: Front, stream: bool
) -> None:
    status, answer = await front.post({**BASE, "structured_outputs": {"regex": "([a-z"}, "stream": stream})
    assert status == 400, answer
    assert msgspec.json.decode(answer)["error"]["message"]
    assert await front.text({**BASE, "max_tokens": 4})


async def test_naive_leaves_the_constraint_on_p_and_the_answer_is_the_same(pair: tuple[str, str]) -> None:
    schema = schema_called("number_naive")
    body = {**BASE, **asking_for(schema)}
    async with proxy_in_front(pair, structured_output="naive") as naive:
        text = await naive.text(body)
        assert naive.p.bodies[-1]["response_format"] == body["response_format"]
    async with proxy_in_front(pair) as front:
        assert await front.text(body) == text

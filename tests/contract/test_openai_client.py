"""The official client against an engine, streaming and not."""

from collections.abc import AsyncIterator

import openai
import pytest

from common.errors import EngineError
from tests.support.serving_rig import Rig, serving_rig

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with serving_rig() as running:
        yield running


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="unused", max_retries=0) as opened:
        yield opened


async def test_chat_whole_and_streamed_say_the_same(client: openai.AsyncOpenAI):
    whole = await client.chat.completions.create(model="m", messages=MESSAGES)
    stream = await client.chat.completions.create(
        model="m", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content == "Hello"
    assert chunks[-1].usage == whole.usage


async def test_completions_take_lists_of_prompts(client: openai.AsyncOpenAI):
    answer = await client.completions.create(model="m", prompt=["a", "b"], logprobs=2, echo=True)
    assert [choice.text for choice in answer.choices] == ["aHello", "bHello"]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens is not None
    assert answer.choices[0].logprobs.tokens[:2] == ["a", "H"]


async def test_tool_calls_parse(client: openai.AsyncOpenAI, rig: Rig):
    rig.engine.text = '[{"name": "f", "parameters": {"x": 1}}]'
    answer = await client.chat.completions.create(
        model="m",
        messages=MESSAGES,
        tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        tool_choice="required",
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("f", '{"x": 1}')


async def test_errors_become_the_client_s_own(client: openai.AsyncOpenAI, rig: Rig):
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="m", messages=MESSAGES, temperature=-5)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="other", messages=MESSAGES)
    rig.engine.fail_after, rig.engine.error = 2, EngineError("it broke")
    stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="it broke"):
        [chunk async for chunk in stream]


async def test_models_are_listed(client: openai.AsyncOpenAI):
    assert [model.id async for model in client.models.list()] == ["m"]


async def test_the_raw_response_carries_the_timing_header(client: openai.AsyncOpenAI):
    raw = await client.chat.completions.with_raw_response.create(model="m", messages=MESSAGES)
    assert "compute;dur=500.000" in raw.headers["Server-Timing"]

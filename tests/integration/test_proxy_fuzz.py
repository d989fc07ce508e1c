"""Whatever a client sends: an answer in OpenAI's form, no 500, nothing left behind."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.proxy_rig import Rig, rig

Runner = tuple[asyncio.AbstractEventLoop, Rig]


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    loop = asyncio.new_event_loop()
    stack = AsyncExitStack()
    started = loop.run_until_complete(stack.enter_async_context(rig()))
    yield loop, started
    loop.run_until_complete(stack.aclose())
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6)
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)
# Left out: prompt_logprobs, and echo with logprobs, which these engines do not answer as they were asked.
NAMES = st.sampled_from(
    [
        *("model", "prompt", "messages", "input", "stream", "stream_options", "n", "max_tokens", "max_output_tokens"),
        *("response_format", "structured_outputs", "tool_choice", "tools", "logprobs"),
        *("kv_transfer_params", "timeline", "text", "instructions", "reasoning", "store", "request_id", "type"),
    ]
)
BODIES = st.dictionaries(NAMES | st.text(max_size=4), VALUES, max_size=6).map(json.dumps).map(str.encode)
PATHS = st.sampled_from(
    ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/abort", "/admin/fleet"]
)
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"required": ["message", "type", "param", "code"]}},
}


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=PATHS, body=BODIES | st.binary(max_size=30) | st.builds(lambda b, n: b[:n], BODIES, st.integers(0, 60)))
def test_any_body_gets_an_answer_that_is_no_500(runner: Runner, path: str, body: bytes) -> None:
    loop, r = runner
    status, _, answer = loop.run_until_complete(asyncio.wait_for(r.post(body, path), 10))
    assert status < 500
    if status >= 400:
        jsonschema.validate(json.loads(answer), ERROR)
    r.assert_nothing_is_held()


HEADERS = st.dictionaries(
    st.sampled_from(["Authorization", "X-Request-Id", "traceparent", "Content-Type", "Accept", "Origin", "Expect"]),
    st.text(alphabet=st.characters(min_codepoint=33, max_codepoint=126), max_size=30),
    max_size=3,
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(headers=HEADERS)
def test_any_headers_get_an_answer_that_is_no_500(runner: Runner, headers: dict[str, str]) -> None:
    loop, r = runner
    status, _, _ = loop.run_until_complete(asyncio.wait_for(r.post({"prompt": "x"}, headers=headers), 10))
    assert status < 500


def test_the_published_description_has_every_path_and_no_other(runner: Runner) -> None:
    loop, r = runner
    status, _, body = loop.run_until_complete(r.get("/openapi.json"))
    document: dict[str, Any] = json.loads(body)
    assert status == 200
    described = {path: frozenset(m.upper() for m in methods) for path, methods in document["paths"].items()}
    assert described == r.proxy.paths
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert {"summary", "responses"} <= set(operation), (path, method)
            schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            if schema is not None:
                jsonschema.Draft202012Validator.check_schema(schema)

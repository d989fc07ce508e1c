"""What a mock engine answers to a chat, and the official client that asks through a proxy rig."""

from collections.abc import Mapping
from typing import Any

import openai
from aiohttp import web

from tests.support import mock_engine as mock
from tests.support.proxy_rig import Rig

HEAD = {"id": "c", "created": 7, "model": "m"}


def client(r: Rig) -> openai.AsyncOpenAI:
    """The official client, asking the rig's proxy."""
    return openai.AsyncOpenAI(base_url=r.url + "/v1", api_key="k", max_retries=0)


def says(message: Mapping[str, Any], usage: Mapping[str, Any], finish: str = "stop") -> mock.Script:
    """A chat completion in one piece."""

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
        return web.json_response({**HEAD, "object": "chat.completion", "choices": [choice], "usage": usage})

    return script

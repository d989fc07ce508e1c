"""Engines take compressed bodies as the proxy does, and refuse what is not one."""

import gzip
from collections.abc import AsyncIterator

import msgspec
import pytest

from tests.support.serving_rig import Rig, serving_rig

CHAT = "/v1/chat/completions"
BASE = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
BODY = msgspec.json.encode(BASE)
GZIP = {"Content-Encoding": "gzip"}
MEMBERS = gzip.compress(BODY[:9]) + gzip.compress(BODY[9:])


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with serving_rig() as running:
        yield running


@pytest.mark.parametrize("body", [gzip.compress(BODY), MEMBERS])
async def test_a_body_of_one_or_more_members_is_answered_as_if_it_were_plain(rig: Rig, body: bytes) -> None:
    answer = await rig.post(CHAT, body, GZIP)
    assert (answer.status, answer.json["choices"]) == (200, (await rig.post(CHAT, BASE)).json["choices"])


@pytest.mark.parametrize(
    ("body", "encoding"),
    [(MEMBERS + b"x", "gzip"), (MEMBERS[:-1], "gzip"), (BODY, "gzip"), (BODY, "br")],
)
async def test_a_body_that_is_not_what_it_says_is_the_clients_fault(rig: Rig, body: bytes, encoding: str) -> None:
    answer = await rig.post(CHAT, body, {"Content-Encoding": encoding})
    assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request_error")


async def test_the_limit_on_bodies_counts_what_comes_out(rig: Rig) -> None:
    bomb = gzip.compress(b" " * (33 << 20), 1)
    assert (await rig.post(CHAT, bomb * 2, GZIP)).status == 413

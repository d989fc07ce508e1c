"""Faults against P, D and the proxy as real processes: a request is caught at a known place of its journey, one process
is hurt, and the answer and everybody's books are looked at.

Places: `prefill` (P computes the prompt), `held` (P holds the KV, D is full with another request), `reading` (D reads,
which takes long enough over tcp only), `stream` (the client has had its first tokens).
"""

import asyncio
import itertools
import json
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.support.trio import ROLES, Trio

TIMEOUTS = {"connect_s": 1.0, "prefill_s": 6.0, "first_token_s": 12.0, "stream_idle_s": 3.0, "request_s": 25.0}
LEASE_TTL_S = 3.0
OVERRIDES: dict[str, dict[str, Any]] = {
    "proxy": {"timeouts": TIMEOUTS},
    "prefill": {"lease_ttl_s": LEASE_TTL_S},
    "decode": {"pull_timeout_s": 2.0, "handshake_timeout_s": 2.0, "engine": {"max_num_seqs": 1}},
}
"""D serves one request at a time: a second one waits, and P holds its KV."""

LATE_S = 1.5
DEADLINE_S = 30.0
"""Every request has its answer by then, whatever happened."""

QUIET_WITHIN_S = 15.0
HELD = {
    "proxy": ("pd_proxy_slots_in_use", "pd_requests_running"),
    "prefill": ("pd_kv_blocks_in_use", "pd_leases_held", "pd_requests_running", "pd_requests_waiting"),
    "decode": ("pd_kv_blocks_in_use", "pd_requests_running", "pd_requests_waiting"),
}
_NUMBERS = itertools.count()


@dataclass
class Asked:
    """One streamed completion. `end` is `right`, `error` (a status, or an event in the stream) or `gone` (it broke)."""

    body: dict[str, Any]
    text: str = ""
    end: str = ""
    detail: str = ""
    seconds: float = 0.0
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, url: str) -> None:
        begun_s = time.monotonic()
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
                session.post(f"{url}/v1/completions", json=self.body) as response,
            ):
                await self._read(response)
        except (aiohttp.ClientError, ConnectionError) as error:
            self.end, self.detail = "gone", repr(error)
        self.seconds = time.monotonic() - begun_s

    async def _read(self, response: aiohttp.ClientResponse) -> None:
        if response.status != 200:
            self.end, self.detail = "error", (await response.json())["error"]["message"]
            return
        async for line in response.content:
            data = line.decode().strip().removeprefix("data: ")
            if data == "[DONE]":
                self.end = self.end or "right"
            elif data and "error" in (event := json.loads(data)):
                self.end, self.detail = "error", event["error"]["message"]
            elif data:
                self.text += "".join(choice["text"] for choice in event["choices"])
                self.has_begun.set()
        self.end = self.end or "gone"


def body_of(place: str, num_prompt_tokens: int | None = None) -> dict[str, Any]:
    """A new prompt of the length that keeps a request at `place` for a while; its tokens follow from the body alone."""
    num_tokens = num_prompt_tokens or {"prefill": 1200, "reading": 1600}.get(place, 40)
    number = next(_NUMBERS)
    prompt = [1000 + (7919 * (number + 1) * (i + 1) + i * i) % 40000 for i in range(num_tokens)]
    num_output = 120 if place == "stream" else 12
    asked = {"max_tokens": num_output, "ignore_eos": True, "temperature": 0, "stream": True}
    return {"model": "smollm2", "prompt": prompt, **asked}


async def until(holds: Callable[[], bool | Awaitable[bool]], limit_s: float, what: str) -> None:
    """Wait for a fact about another process, which can only be polled."""
    give_up_at = time.monotonic() + limit_s
    while True:
        value = holds()
        if value if isinstance(value, bool) else await value:
            return
        if time.monotonic() > give_up_at:
            raise AssertionError(f"not in {limit_s} s: {what}")
        await asyncio.sleep(0.003)


async def total(trio: Trio, role: str, metric: str) -> float:
    return await asyncio.to_thread(trio.total, role, metric)


async def reach(trio: Trio, place: str, asked: Asked) -> None:
    """Return when the request is at `place`."""

    async def is_there(role: str, metric: str) -> bool:
        return await total(trio, role, metric) > 0

    match place:
        case "prefill":
            await until(lambda: is_there("prefill", "pd_requests_running"), 10, "P prefills")
        case "held":
            await until(lambda: is_there("decode", "pd_requests_waiting"), 10, "D waits with P's KV held")
        case "reading":
            await until(lambda: is_there("decode", "pd_requests_waiting"), 20, "D reads")
        case _:
            await asyncio.wait_for(asked.has_begun.wait(), 10)


@asynccontextmanager
async def occupied(trio: Trio, place: str) -> AsyncIterator[None]:
    """Where the place is `held`, D is full with another request for as long as this lasts."""
    if place != "held":
        yield
        return
    other = Asked({**body_of("stream"), "max_tokens": 3000})
    task = asyncio.create_task(other.run(trio.url("decode")))
    try:
        await asyncio.wait_for(other.has_begun.wait(), 10)
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def hurt(trio: Trio, victim: str, fault: str) -> None:
    """`kill` ends the process; `stop` and `delay` freeze it."""
    number = signal.SIGKILL if fault == "kill" else signal.SIGSTOP
    trio.processes[victim].send_signal(number)
    if fault == "kill":
        trio.processes.pop(victim).wait(10)


async def heal(trio: Trio, victim: str, fault: str) -> None:
    """Whoever was hurt serves again."""
    if fault == "kill":
        trio.start(victim)
    else:
        trio.processes[victim].send_signal(signal.SIGCONT)
    for role in ROLES:
        await asyncio.to_thread(trio.wait_ready, role)


async def assert_nothing_held(trio: Trio, roles: tuple[str, ...]) -> None:
    """Blocks, leases, slots and requests of these processes are back at zero, within a bound."""
    found: dict[str, float] = {}

    async def is_empty() -> bool:
        found.clear()
        for role in roles:
            found.update({f"{role} {metric}": await total(trio, role, metric) for metric in HELD[role]})
        return not any(found.values())

    try:
        await until(is_empty, QUIET_WITHIN_S, "everything was let go")
    except AssertionError as error:
        raise AssertionError(f"{error}; still held: {[name for name, value in found.items() if value]}") from None


async def one_cell(trio: Trio, place: str, victim: str, fault: str, num_prompt_tokens: int | None = None) -> Asked:
    """Ask, hurt, wait for the answer, look at the books of whoever is left, heal."""
    asked = Asked(body_of(place, num_prompt_tokens))
    async with asyncio.TaskGroup() as group:
        async with occupied(trio, place):
            answering = group.create_task(asked.run(trio.url("proxy")))
            await reach(trio, place, asked)
            hurt(trio, victim, fault)
            if fault == "delay":
                await asyncio.sleep(LATE_S)
                await heal(trio, victim, fault)
        await asyncio.wait_for(answering, DEADLINE_S)
    if fault != "delay":
        survivors = tuple(role for role in ROLES if role != victim)
        if fault == "kill":
            await assert_nothing_held(trio, survivors)
        await heal(trio, victim, fault)
    await assert_nothing_held(trio, ROLES)
    return asked


async def assert_fault_free_text(trio: Trio, asked: Asked) -> None:
    again = Asked(asked.body)
    await again.run(trio.url("proxy"))
    assert again.end == "right", again.detail
    assert asked.text == again.text

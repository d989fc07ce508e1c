"""Faults against P, D and the proxy as real processes: a request is caught at a known place of its journey, one process
is hurt, and the answer and everybody's books are looked at.

Places, by journey row: `body` (1: half of the body has come), `queued` (2: the proxy's only slot is another request's),
`prepare` (3a: D compiles its grammar, P computes the prompt), `prefill` (3b), `held` (4 to 6: P holds the KV, D is full
with another request), `reading` (7: D reads, which takes long enough over tcp only), `stream` (8 and 9: the client has
had its first tokens).
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
from aiohttp import web

from tests.support.trio import ROLES, Trio

TIMEOUTS = {"connect_s": 1.0, "prefill_s": 6.0, "first_token_s": 12.0, "stream_idle_s": 3.0, "request_s": 25.0}
LEASE_TTL_S = 3.0
OVERRIDES: dict[str, dict[str, Any]] = {
    "proxy": {"timeouts": TIMEOUTS, "admission": {"max_concurrent": 1}},
    "prefill": {"lease_ttl_s": LEASE_TTL_S},
    "decode": {
        "pull_timeout_s": 2.0,
        "handshake_timeout_s": 2.0,
        "engine": {"max_num_seqs": 1, "grammar": {"compile_timeout_s": 30.0}},
    },
}
"""The proxy and D serve one request at a time: a second one waits in front of the proxy, or P holds its KV."""

LATE_S = 1.5
DEADLINE_S = 30.0
"""Every request has its answer by then, whatever happened."""

QUIET_WITHIN_S = 15.0
TRIES = 5
"""To catch a request."""

JSON = {"Content-Type": "application/json"}
HELD = {
    "proxy": ("pd_proxy_slots_in_use", "pd_requests_running", "pd_proxy_requests_queued"),
    "prefill": ("pd_kv_blocks_in_use", "pd_leases_held", "pd_requests_running", "pd_requests_waiting"),
    "decode": ("pd_kv_blocks_in_use", "pd_requests_running", "pd_requests_waiting"),
}
TASKS = "pd_proxy_tasks"
"""The proxy's background tasks: as many after a fault as before."""

_NUMBERS = itertools.count()


@dataclass
class Asked:
    """One streamed completion. `end` is `right`, `error` (a status, or an event in the stream) or `gone` (it broke).

    With `in_halves` the second half of the body is sent once `may_end` is set.
    """

    body: dict[str, Any]
    in_halves: bool = False
    text: str = ""
    end: str = ""
    detail: str = ""
    seconds: float = 0.0
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    has_sent_half: asyncio.Event = field(default_factory=asyncio.Event)
    may_end: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, url: str) -> None:
        begun_s = time.monotonic()
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
                session.post(f"{url}/v1/completions", data=self._pieces(), headers=JSON) as response,
            ):
                await self._read(response)
        except (aiohttp.ClientError, ConnectionError) as error:
            self.end, self.detail = "gone", repr(error)
        self.seconds = time.monotonic() - begun_s

    async def _pieces(self) -> AsyncIterator[bytes]:
        data = json.dumps(self.body).encode()
        half = len(data) // 2 if self.in_halves else 0
        if half:
            yield data[:half]
            self.has_sent_half.set()
            await self.may_end.wait()
        yield data[half:]

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
    num_tokens = num_prompt_tokens or {"prefill": 1200, "prepare": 1200, "reading": 1600}.get(place, 40)
    number = next(_NUMBERS)
    prompt = [1000 + (7919 * (number + 1) * (i + 1) + i * i) % 40000 for i in range(num_tokens)]
    num_output = 120 if place == "stream" else 12
    asked = {"max_tokens": num_output, "ignore_eos": True, "temperature": 0, "stream": True}
    if place == "prepare":
        asked["structured_outputs"] = {"json": {"type": "integer", "multipleOf": 200_003 + number}}
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


class Missed(Exception):
    """The request was answered before it was seen where it was to be caught: some places take milliseconds."""


async def reach(trio: Trio, place: str, asked: Asked) -> None:
    """Return when the request is at `place`.

    Raises:
        Missed: it was too fast; ask again.
    """

    async def is_there(role: str, metric: str) -> bool:
        is_seen = await total(trio, role, metric) > 0
        if asked.end and not is_seen:
            raise Missed(place)
        return is_seen

    async def is_prepared() -> bool:
        return await _is_compiling(trio) and await is_there("prefill", "pd_requests_running")

    match place:
        case "body":
            await asyncio.wait_for(asked.has_sent_half.wait(), 10)
        case "queued":
            await until(lambda: is_there("proxy", "pd_proxy_requests_queued"), 10, "the proxy has no slot")
        case "prepare":
            await until(is_prepared, 10, "D compiles while P prefills")
        case "prefill":
            await until(lambda: is_there("prefill", "pd_requests_running"), 10, "P prefills")
        case "held":
            await until(lambda: is_there("decode", "pd_requests_waiting"), 10, "D waits with P's KV held")
        case "reading":
            await until(lambda: is_there("decode", "pd_requests_waiting"), 20, "D reads")
        case _:
            await asyncio.wait_for(asked.has_begun.wait(), 10)


async def _is_compiling(trio: Trio) -> bool:
    """Whether D has begun more compilations than it has ended."""
    metrics = await asyncio.to_thread(trio.metrics, "decode")
    ended = sum(value for name, value in metrics.items() if name.startswith("pd_grammar_compile_seconds_count"))
    return metrics.get('pd_grammar_cache_total{result="miss"}', 0.0) > ended


@asynccontextmanager
async def occupied(trio: Trio, place: str) -> AsyncIterator[None]:
    """Another request fills D where the place is `held`, the proxy where it is `queued`, for as long as this lasts."""
    role = {"held": "decode", "queued": "proxy"}.get(place)
    if role is None:
        yield
        return
    other = Asked({**body_of("stream"), "max_tokens": 3000})
    task = asyncio.create_task(other.run(trio.url(role)))
    try:
        await asyncio.wait_for(other.has_begun.wait(), 10)
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


@dataclass
class Refuser:
    """Whoever answers on a dead engine's port: `503` to everything, handshakes, probes and legs alike."""

    runner: web.AppRunner

    @classmethod
    async def at(cls, port: int) -> "Refuser":
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", _refuse)
        refuser = cls(web.AppRunner(app))
        await refuser.runner.setup()
        await web.TCPSite(refuser.runner, "127.0.0.1", port, reuse_address=True).start()
        return refuser


async def _refuse(_: web.Request) -> web.Response:
    error = {"message": "no such engine here", "type": "service_unavailable", "code": "not_here", "param": None}
    return web.json_response({"error": error}, status=503)


class Fault:
    """What happens to one process: `kill` ends it (connections are refused), `refuse` puts somebody else in its place,
    `restart` a new process of the same kind; `stop` and `delay` freeze it."""

    def __init__(self, trio: Trio, victim: str, kind: str) -> None:
        self._trio, self._victim, self.kind = trio, victim, kind
        self._refuser: Refuser | None = None
        self._is_on = False

    @property
    def is_passing(self) -> bool:
        """Whether it is over by itself while the request goes on."""
        return self.kind in ("delay", "restart")

    @property
    def survivors(self) -> tuple[str, ...]:
        """Who can be asked while it lasts."""
        return tuple(role for role in ROLES if role != self._victim)

    async def begin(self) -> None:
        """Hurt the process."""
        self._is_on = True
        process = self._trio.processes[self._victim]
        if self.kind in ("stop", "delay"):
            process.send_signal(signal.SIGSTOP)
        else:
            process.send_signal(signal.SIGKILL)
            await asyncio.to_thread(self._trio.processes.pop(self._victim).wait, 10)
        if self.kind == "refuse":
            self._refuser = await Refuser.at(self._trio.ports[self._victim])

    async def resume(self) -> None:
        """Whoever was hurt goes on, or begins anew. Idempotent."""
        if not self._is_on:
            return
        self._is_on = False
        if self._refuser is not None:
            await self._refuser.runner.cleanup()
        if self.kind in ("stop", "delay"):
            self._trio.processes[self._victim].send_signal(signal.SIGCONT)
        else:
            self._trio.start(self._victim)

    async def end(self) -> None:
        """The same, and everybody knows."""
        await self.resume()
        for role in ROLES:
            await asyncio.to_thread(self._trio.wait_ready, role)


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


async def one_cell(trio: Trio, place: str, victim: str, kind: str, num_prompt_tokens: int | None = None) -> Asked:
    """Ask, hurt, wait for the answer, look at the books of whoever is left, heal.

    Raises:
        AssertionError: a book does not balance, or the request was never caught.
    """
    for _ in range(TRIES):
        asked = await _one_try(trio, place, victim, kind, num_prompt_tokens)
        if asked is not None:
            return asked
    raise AssertionError(f"never caught: {place}")


async def _one_try(trio: Trio, place: str, victim: str, kind: str, num_prompt_tokens: int | None) -> Asked | None:
    """One try; one that fails says what the processes logged, and leaves them whole for the next test."""
    asked, fault = Asked(body_of(place, num_prompt_tokens), in_halves=place == "body"), Fault(trio, victim, kind)
    try:
        return await _hurt_once(trio, place, asked, fault)
    except Exception as error:
        error.add_note(f"the answer by then: {asked.end or 'none'} {asked.detail} after {asked.seconds:.1f} s")
        for role in ROLES:
            error.add_note(f"--- {role}\n{trio.log(role, 1500)}")
        await fault.end()
        raise


async def _hurt_once(trio: Trio, place: str, asked: Asked, fault: Fault) -> Asked | None:
    num_tasks = await total(trio, "proxy", TASKS)
    async with asyncio.TaskGroup() as group:
        async with occupied(trio, place):
            answering = group.create_task(asked.run(trio.url("proxy")))
            try:
                await reach(trio, place, asked)
            except Missed:
                return None
            await fault.begin()
            if fault.kind == "delay":
                await asyncio.sleep(LATE_S)
            if fault.is_passing:
                await fault.end()
        asked.may_end.set()
        await asyncio.wait_for(answering, DEADLINE_S)
    if not fault.is_passing:
        if fault.kind != "stop":
            await assert_nothing_held(trio, fault.survivors)
        await fault.end()
    await assert_nothing_held(trio, ROLES)
    await until(lambda: _equals(trio, TASKS, num_tasks), QUIET_WITHIN_S, "the proxy's tasks ended")
    return asked


async def _equals(trio: Trio, metric: str, wanted: float) -> bool:
    return await total(trio, "proxy", metric) == wanted


async def assert_fault_free_text(trio: Trio, asked: Asked) -> None:
    again = Asked(asked.body)
    await again.run(trio.url("proxy"))
    assert again.end == "right", again.detail
    assert asked.text == again.text

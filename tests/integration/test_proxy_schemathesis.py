"""schemathesis plays clients made from the published description: what it says is what happens, and nothing is left."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import checks

from tests.support.proxy_rig import Rig, rig, until

ANSWER_WITHIN_S = 10
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.unsupported_method,
]


@dataclass
class Running:
    """A rig on a thread of its own: schemathesis' client blocks."""

    rig: Rig
    loop: asyncio.AbstractEventLoop

    def settle(self) -> None:
        """Wait until nothing is under way, then see that nothing is left."""

        async def look() -> None:
            await until(lambda: self.rig.services.admission.num_running == 0)
            self.rig.assert_nothing_is_held()

        asyncio.run_coroutine_threadsafe(look(), self.loop).result(ANSWER_WITHIN_S)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    started: Future[Rig] = Future()
    loop = asyncio.new_event_loop()
    stack = AsyncExitStack()

    def serve() -> None:
        asyncio.set_event_loop(loop)
        started.set_result(loop.run_until_complete(stack.enter_async_context(rig())))
        loop.run_forever()
        loop.run_until_complete(stack.aclose())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    yield Running(started.result(ANSWER_WITHIN_S), loop)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(ANSWER_WITHIN_S)


def play(running: Running, num_examples: int) -> None:
    """Every operation of the published description, `num_examples` requests each."""
    described = schemathesis.openapi.from_url(f"{running.rig.url}/openapi.json")
    for found in described.get_all_operations():
        operation = found.ok()

        @settings(max_examples=num_examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def call(case: schemathesis.Case) -> None:
            case.call_and_validate(checks=CHECKS, timeout=ANSWER_WITHIN_S)
            running.settle()

        call()


def test_what_is_described_is_what_happens(running: Running) -> None:
    play(running, 10)


@pytest.mark.long
def test_what_is_described_is_what_happens_for_many_more(running: Running) -> None:
    play(running, 300)

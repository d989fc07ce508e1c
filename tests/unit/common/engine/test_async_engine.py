"""The engine from the event loop's side; a real step-loop thread over fakes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from common.clock import SystemClock
from common.engine.async_engine import AsyncEngine, OutputStream
from common.engine.ports import PullStatus
from common.engine.request_state import FinishReason
from common.engine.step import StepResult
from common.errors import ContextLengthExceeded, EngineError, InvalidRequest, NotReady, QueueFull
from common.ids import RequestId
from common.wire.kv_params import KvReference
from tests.support.fake_engine import FakeEngine, ask, greedy, make_engine
from tests.support.fake_grammar import up_to
from tests.support.fake_kv import reference_to
from tests.support.fake_model import continuation

PROMPT = [5, 6, 7, 8, 9, 10, 11]
WITHIN_S = 30.0


@asynccontextmanager
async def running(fake: FakeEngine, max_queued_requests: int = 100) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(fake.core, SystemClock(), max_queued_requests)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def read(stream: OutputStream) -> list[int]:
    async with asyncio.timeout(WITHIN_S):
        return [token async for delta in stream for token in delta.token_ids]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():  # noqa: ASYNC110 - the step loop is another thread and tells nobody about its status
            await asyncio.sleep(0)


async def until_idle(engine: AsyncEngine) -> None:
    await until(lambda: engine.status().num_blocks_in_use == engine.status().num_running == 0)


async def test_streams_give_their_tokens_in_order_and_end() -> None:
    async with running(make_engine()) as engine:
        streams = {i: engine.submit(ask(f"r{i}", [i + 1, *PROMPT], greedy(10))) for i in range(12)}
        async with asyncio.TaskGroup() as group:
            tasks = {i: group.create_task(read(stream)) for i, stream in streams.items()}
        for i, task in tasks.items():
            assert task.result() == continuation([i + 1, *PROMPT], 10)
            assert streams[i].is_finished
        assert engine.num_open_streams == 0


async def test_reading_past_the_end_stops() -> None:
    async with running(make_engine()) as engine, engine.submit(ask("a", PROMPT, greedy(2))) as stream:
        await read(stream)
        with pytest.raises(StopAsyncIteration):
            await stream.next()


async def test_choices_come_interleaved_with_their_index_until_each_has_ended() -> None:
    async with running(make_engine()) as engine, engine.submit(ask("a", PROMPT, greedy(4, n=3))) as stream:
        deltas = [delta async for delta in stream]
    for index in range(3):
        said = [token for delta in deltas if delta.index == index for token in delta.token_ids]
        assert said == continuation(PROMPT, 4)
    assert sorted(delta.index for delta in deltas if delta.finish is not None) == [0, 1, 2]


async def test_leaving_a_stream_aborts_it_and_frees_its_blocks() -> None:
    async with running(make_engine()) as engine:
        async with engine.submit(ask("a", PROMPT, greedy(150, ignore_eos=True))) as stream:
            await stream.next()
        assert engine.num_open_streams == 0
        await until_idle(engine)
        assert await read(engine.submit(ask("b", PROMPT, greedy(5)))) == continuation(PROMPT, 5)


async def test_an_abort_by_id_ends_the_stream_of_whoever_reads_it() -> None:
    async with running(make_engine()) as engine, engine.submit(ask("a", PROMPT, constraint=up_to(3))) as stream:
        engine.abort(stream.request_id)
        deltas = [delta async for delta in stream]
        assert deltas[-1].finish in (FinishReason.ABORTED, FinishReason.STOP)
        engine.abort(stream.request_id)


async def test_a_choice_its_reader_ends_is_let_go_while_the_others_go_on() -> None:
    async with running(make_engine()) as engine, engine.submit(ask("a", PROMPT, greedy(60, n=2))) as stream:
        while (await stream.next()).index != 1:
            pass
        stream.end_choice(1)
        deltas = [delta async for delta in stream]
        stream.end_choice(0)
    ends = {delta.index: delta.finish for delta in deltas if delta.finish is not None}
    assert ends == {0: FinishReason.LENGTH, 1: FinishReason.ABORTED}


async def test_a_settled_grammar_wakes_a_sleeping_engine() -> None:
    fake = make_engine(auto=False)
    async with running(fake) as engine, engine.submit(ask("a", PROMPT, constraint=up_to(3))) as stream:
        await until(lambda: engine.status().num_waiting_for_grammar == 1)
        fake.grammars.tickets[0].settle()
        assert len(await read(stream)) == 4


async def test_the_outcome_of_a_pull_reaches_a_sleeping_engine_through_wake() -> None:
    fake = make_engine(auto=False)
    request = ask("a", PROMPT, greedy(3), reference=reference_to(PROMPT, 4))
    async with running(fake) as engine, engine.submit(request) as stream:
        await until(lambda: engine.status().num_pulls_started == 1)
        fake.source.settle(request.request_id, PullStatus.FAILED, cause="gone")
        engine.wake()
        assert await read(stream) == continuation(PROMPT, 3)
        assert engine.status().fallbacks == {"gone": 1}


async def test_an_idle_engine_takes_no_steps() -> None:
    fake, num_turns = make_engine(), list[int]()
    step = fake.core.step

    def counted() -> StepResult:
        num_turns.append(1)
        return step()

    fake.core.step = counted  # type: ignore[method-assign]  # counts the turns of the loop
    async with running(fake) as engine:
        await read(engine.submit(ask("a", PROMPT)))
        sleeping = engine._condition._waiters  # type: ignore[attr-defined]  # who sleeps in it
        await until(lambda: len(sleeping) == 1)
        num_turns.clear()
        for _ in range(100):
            await asyncio.sleep(0)
        assert not num_turns
        assert len(sleeping) == 1


async def test_more_waiting_than_allowed_is_refused_until_some_have_started() -> None:
    fake = make_engine(auto=False)
    async with running(fake, max_queued_requests=2) as engine:
        streams = [engine.submit(ask(name, PROMPT, constraint=up_to(2))) for name in "ab"]
        with pytest.raises(QueueFull):
            engine.submit(ask("c", PROMPT))
        for ticket in fake.grammars.tickets:
            ticket.settle()
        for stream in streams:
            await read(stream)
        assert await read(engine.submit(ask("c", PROMPT))) == continuation(PROMPT, 8)


async def test_those_who_leave_while_waiting_make_room_in_the_queue() -> None:
    async with running(make_engine(auto=False), max_queued_requests=1) as engine:
        for name in "abc":
            async with engine.submit(ask(name, PROMPT, constraint=up_to(2))):
                pass


async def test_a_request_that_can_never_fit_is_refused_before_it_has_a_stream() -> None:
    async with running(make_engine(num_blocks=4)) as engine:
        with pytest.raises(ContextLengthExceeded):
            engine.submit(ask("a", PROMPT, greedy(100)))
        assert engine.num_open_streams == 0


async def test_an_id_in_use_is_refused() -> None:
    async with running(make_engine(auto=False)) as engine, engine.submit(ask("a", PROMPT, constraint=up_to(2))):
        with pytest.raises(InvalidRequest):
            engine.submit(ask("a", PROMPT))


async def test_a_request_that_cannot_be_admitted_ends_alone() -> None:
    fake = make_engine()
    expect = fake.source.expect

    def broken_for_one(request_id: RequestId, reference: KvReference) -> None:
        if request_id == "bad":
            raise ZeroDivisionError("a bug")
        expect(request_id, reference)

    fake.source.expect = broken_for_one  # type: ignore[method-assign]  # the injected bug
    async with running(fake) as engine:
        asked = [ask(name, PROMPT, greedy(5), reference=reference_to(PROMPT, 4)) for name in ("good", "bad", "fine")]
        good, bad, fine = (engine.submit(request) for request in asked)
        async with asyncio.timeout(WITHIN_S):
            assert isinstance((await bad.next()).error, EngineError)
            for stream in (good, fine):
                engine.wake()
                assert await read(stream) == continuation(PROMPT, 5)


async def test_a_bug_in_a_step_ends_every_request_and_the_next_is_served() -> None:
    fake = make_engine()
    plan, is_broken = fake.core.scheduler.plan, [True]

    def broken_once() -> object:
        if is_broken.pop() if is_broken else False:
            raise ZeroDivisionError("a bug")
        return plan()

    fake.core.scheduler.plan = broken_once  # type: ignore[method-assign, assignment]  # the injected bug
    async with running(fake) as engine:
        async with asyncio.timeout(WITHIN_S):
            delta = await engine.submit(ask("a", PROMPT)).next()
        assert isinstance(delta.error, EngineError)
        assert await read(engine.submit(ask("b", PROMPT))) == continuation(PROMPT, 8)


async def test_an_engine_beyond_repair_says_so_and_leaves_nobody_waiting() -> None:
    fake = make_engine()

    def broken() -> object:
        raise ZeroDivisionError("a bug")

    fake.core.scheduler.plan = broken  # type: ignore[method-assign, assignment]  # the injected bug
    async with running(fake) as engine:
        async with asyncio.timeout(WITHIN_S):
            delta = await engine.submit(ask("a", PROMPT)).next()
            assert delta.finish is FinishReason.ERROR
        await until(lambda: not engine.status().is_alive)
        with pytest.raises(NotReady):
            engine.submit(ask("b", PROMPT))


async def test_closing_ends_open_streams_and_refuses_new_ones() -> None:
    fake = make_engine(auto=False)
    engine = AsyncEngine(fake.core, SystemClock())
    await engine.start()
    stream = engine.submit(ask("a", PROMPT, greedy(4, n=2), constraint=up_to(2)))
    await engine.close()
    async with asyncio.timeout(WITHIN_S):
        deltas = [delta async for delta in stream]
    assert [delta.index for delta in deltas] == [0, 1]
    assert all(isinstance(delta.error, NotReady) for delta in deltas)
    with pytest.raises(NotReady):
        engine.submit(ask("b", PROMPT))
    await engine.close()


async def test_a_reader_that_is_cancelled_leaves_nothing_behind() -> None:
    async with running(make_engine()) as engine:

        async def read_forever() -> None:
            async with engine.submit(ask("a", PROMPT, greedy(150, ignore_eos=True))) as stream:
                async for _ in stream:
                    pass

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await read_forever()
        await until_idle(engine)
        assert engine.num_open_streams == 0

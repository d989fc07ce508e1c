"""The engine as the event loop sees it: submit a request, await its tokens, leave to abort.

Journey rows 5, 8, x. Owns: the step-loop thread, the command queue, the streams. Outputs cross to the event loop once
per step. Does not know: what a step does, text, HTTP.
"""

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import Condition, Thread
from types import TracebackType
from typing import TypeVar

import structlog
import torch

from common.clock import Clock
from common.engine.core import EngineCore
from common.engine.outputs import TokenDelta
from common.engine.request import GenerateRequest
from common.engine.request_state import FinishReason
from common.engine.status import EngineStatus
from common.engine.step import StepResult
from common.engine.structured_output.grammar import GrammarTicket
from common.errors import EngineError, InvalidRequest, NotReady, PDError, QueueFull
from common.ids import RequestId

log = structlog.get_logger(__name__)

PayloadT = TypeVar("PayloadT")

SWITCH_INTERVAL_S = 0.0005
"""How long a thread that runs Python code may keep another from starting. With Python's 5 ms, each hop between the step
loop and the event loop could wait that long behind a busy neighbour, several times on the way to a first token."""

MIN_RETRY_AFTER_S = 1.0
QUEUE_TIME_WEIGHT = 0.2
"""Of the newest request in the running mean of queueing times that `Retry-After` is made of."""

CLOSE_TIMEOUT_S = 30.0
"""How long `close` waits for a step that is running; a step is bounded by the token budget."""


@dataclass(frozen=True, slots=True)
class _Add:
    request: GenerateRequest
    ticket: GrammarTicket | None


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: RequestId
    index: int | None = None


class OutputStream:
    """The answers of one request, in order. Event loop only.

    An async context manager: leaving it while choices are unfinished aborts them. Iterating yields deltas until every
    choice has had its `finish`.
    """

    def __init__(self, engine: "AsyncEngine", request_id: RequestId, num_choices: int, submitted_at_s: float) -> None:
        self.request_id = request_id
        self.submitted_at_s = submitted_at_s
        self._engine = engine
        self._open = set(range(num_choices))
        self._num_unread_ends = num_choices
        self._pending: deque[TokenDelta] = deque()
        self._arrived = asyncio.Event()
        self.is_started = False

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended and been read."""
        return self._num_unread_ends == 0

    async def next(self) -> TokenDelta:
        """The next delta; waits for it.

        Raises:
            StopAsyncIteration: every choice has ended and been read.
        """
        if self.is_finished:
            raise StopAsyncIteration
        while not self._pending:
            self._arrived.clear()
            await self._arrived.wait()
        delta = self._pending.popleft()
        if delta.finish is not None:
            self._num_unread_ends -= 1
        return delta

    def __aiter__(self) -> "OutputStream":
        return self

    async def __anext__(self) -> TokenDelta:
        return await self.next()

    async def __aenter__(self) -> "OutputStream":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Abort what is unfinished; idempotent."""
        self._num_unread_ends = 0
        if self._open:
            self._open.clear()
            self._engine.leave(self)

    def end_choice(self, index: int) -> None:
        """The reader has no use for the rest of one choice (a stop string): free what it holds, its siblings go on.

        Its last delta, ABORTED, still comes.
        """
        if index in self._open:
            self._engine.abort(self.request_id, index)

    def push(self, delta: TokenDelta) -> bool:
        """Take a delta from the engine; returns whether that was the last one."""
        self._pending.append(delta)
        if delta.finish is not None:
            self._open.discard(delta.index)
        self._arrived.set()
        return not self._open

    def break_off(self, error: PDError) -> None:
        """The engine will answer no more: every open choice ends with `error`."""
        for index in sorted(self._open):
            self.push(TokenDelta(request_id=self.request_id, index=index, finish=FinishReason.ERROR, error=error))


class AsyncEngine:
    """Runs an `EngineCore` on its own thread.

    Args:
        core: the engine; nobody else may touch it after `start`.
        clock: measures how long requests queue, for `Retry-After`. Nothing waits by it: the loop sleeps until woken.
        max_queued_requests: more than this waiting for their first step are refused.
    """

    def __init__(self, core: EngineCore, clock: Clock, max_queued_requests: int = 1024) -> None:
        self._core = core
        self._clock = clock
        self._max_queued_requests = max_queued_requests
        self._streams: dict[RequestId, OutputStream] = {}
        self._num_queued = 0
        self._queued_for_s = MIN_RETRY_AFTER_S
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: Thread | None = None
        self._condition = Condition()  # guards the three below
        self._commands: deque[_Add | _Abort] = deque()
        self._is_woken = False
        self._is_closing = False
        self._status = core.status()

    async def start(self) -> None:
        """Start the step loop; the running event loop is the one that outputs go to."""
        self._loop = asyncio.get_running_loop()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._thread = Thread(target=self._run, name="step-loop", daemon=True)
        self._thread.start()

    def submit(self, request: GenerateRequest) -> OutputStream:
        """Hand a request in; its grammar begins to compile at once. Event loop only.

        Raises:
            ClientError: the request can never be served here (see `EngineCore.check`, `GrammarService.compile`).
            QueueFull: too many wait already.
            NotReady: the engine is closed or broken.
        """
        if self._thread is None or self._is_closing or not self._status.is_alive:
            raise NotReady("the engine is not running")
        if self._num_queued >= self._max_queued_requests:
            message = f"{self._num_queued} requests are waiting already"
            raise QueueFull(message, retry_after_s=max(MIN_RETRY_AFTER_S, self._queued_for_s))
        if request.request_id in self._streams:
            raise InvalidRequest(f"request id {request.request_id} is in use", param="request_id")
        self._core.check(request)
        ticket = self._core.compile(request)
        stream = OutputStream(self, request.request_id, request.sampling.n, self._clock.now_s())
        self._streams[request.request_id] = stream
        self._num_queued += 1
        self._send(_Add(request, ticket))
        if ticket is not None:
            ticket.on_settled(self.wake)
        return stream

    def abort(self, request_id: RequestId, index: int | None = None) -> None:
        """End a request, or one of its choices; its reader gets the ABORTED endings. Event loop only."""
        if request_id in self._streams:
            self._send(_Abort(request_id, index))

    def leave(self, stream: OutputStream) -> None:
        """The reader of `stream` is gone: end its request, deliver nothing more. Event loop only."""
        if self._streams.pop(stream.request_id, None) is not None:
            self._mark_started(stream)
            self._send(_Abort(stream.request_id))

    def wake(self) -> None:
        """Something may be ready to be polled. Any thread."""
        with self._condition:
            self._is_woken = True
            self._condition.notify()

    def status(self) -> EngineStatus:
        """The engine after its last step. Any thread."""
        return replace(self._status, is_alive=self._status.is_alive and not self._is_closing)

    @property
    def num_open_streams(self) -> int:
        """Requests whose stream is open and unfinished. Event loop only."""
        return len(self._streams)

    async def close(self) -> None:
        """Stop the step loop, end every open stream with an error. Idempotent."""
        with self._condition:
            self._is_closing = True
            self._condition.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)
        self._break_streams(NotReady("the engine is shutting down"))

    # -- event loop --------------------------------------------------------------------------------------------------

    def _send(self, command: _Add | _Abort) -> None:
        with self._condition:
            self._commands.append(command)
            self._is_woken = True
            self._condition.notify()

    def _deliver(self, result: StepResult) -> None:
        for request_id in result.started:
            stream = self._streams.get(request_id)
            if stream is not None:
                self._mark_started(stream)
        for delta in result.deltas:
            stream = self._streams.get(delta.request_id)
            if stream is not None and stream.push(delta):
                del self._streams[delta.request_id]
                self._mark_started(stream)

    def _mark_started(self, stream: OutputStream) -> None:
        if not stream.is_started:
            stream.is_started = True
            self._num_queued -= 1
            queued_for_s = self._clock.now_s() - stream.submitted_at_s
            self._queued_for_s += QUEUE_TIME_WEIGHT * (queued_for_s - self._queued_for_s)

    def _break_streams(self, error: PDError) -> None:
        """Nobody will answer any more: give every open choice an ending."""
        streams, self._streams, self._num_queued = self._streams, {}, 0
        for stream in streams.values():
            stream.break_off(error)

    # -- step loop ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with torch.inference_mode():
            self._step_until_closed()

    def _step_until_closed(self) -> None:
        while (commands := self._wait()) is not None:
            try:
                result = self._turn(commands)
            except Exception as error:  # a bug in a step must not leave requests without an end
                log.exception("engine.step_failed")
                recovered = self._recover(error)
                if recovered is None:
                    return
                result = recovered
            self._post(result)
            if result.did_work:
                with self._condition:
                    self._is_woken = True

    def _wait(self) -> Sequence[_Add | _Abort] | None:
        """Sleep until there is something to do; the commands that came in, or None to stop."""
        with self._condition:
            while not self._is_woken and not self._is_closing:
                self._condition.wait()
            if self._is_closing:
                return None
            self._is_woken = False
            commands = tuple(self._commands)
            self._commands.clear()
            return commands

    def _turn(self, commands: Sequence[_Add | _Abort]) -> StepResult:
        for command in commands:
            if isinstance(command, _Abort):
                self._core.abort(command.request_id, command.index)
                continue
            try:
                self._core.add(command.request, command.ticket)
            except Exception as error:  # one request's trouble; the commands behind it are still to be obeyed
                log.exception("engine.admission_failed", request_id=command.request.request_id)
                self._core.refuse(command.request, error)
        result = self._core.step()
        self._status = self._core.status()
        return result

    def _recover(self, error: Exception) -> StepResult | None:
        """End every request after a bug and go on; None, and the engine is dead, when even that fails."""
        try:
            self._core.fail_all(EngineError(f"the engine step failed: {type(error).__name__}: {error}"))
            result = self._core.step()
        except Exception:  # the core is beyond repair; say so instead of hanging
            log.exception("engine.dead")
            self._status = replace(self._status, is_alive=False)
            self._call_soon(self._break_streams, EngineError("the engine broke down"))
            return None
        self._status = self._core.status()
        return result

    def _post(self, result: StepResult) -> None:
        if result.deltas or result.started:
            self._call_soon(self._deliver, result)

    def _call_soon(self, callback: Callable[[PayloadT], None], payload: PayloadT) -> None:
        if self._loop is None or self._loop.is_closed():
            return  # the process is going down; nobody is left to hear it
        self._loop.call_soon_threadsafe(callback, payload)

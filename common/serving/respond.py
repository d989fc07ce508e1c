"""From a job to an HTTP answer: status and headers leave together with the first token, never before (journey row 9).

Owns: that order, the `Server-Timing` header, SSE framing, errors after the headers.
Does not know: what bodies look like.
"""

import asyncio
from collections.abc import Mapping
from typing import Protocol

import structlog
from aiohttp import web

from common.openai import error_body, sse
from common.serving.final_check import CheckingSink, FinalCheck
from common.serving.generation import ChoiceDelta, Sink, generate
from common.serving.job import Job
from common.serving.ports import Engine
from common.serving.served_model import ServedModel
from common.telemetry.metrics import Metrics
from common.telemetry.timeline import Event, stages_s, whole_s
from common.wire import timing

_log = structlog.get_logger(__name__)

REQUEST_ID = "X-Request-Id"
STREAM_HEADERS = {"Content-Type": sse.CONTENT_TYPE, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class StreamForm(Protocol):
    """Writes the events of a stream."""

    def events(self, delta: ChoiceDelta) -> list[bytes]:
        """JSON of what one delta adds."""
        ...

    def closing_events(self) -> list[bytes]:
        """JSON of what follows the last delta."""
        ...


class WholeForm(Protocol):
    """Writes one body."""

    def add(self, delta: ChoiceDelta) -> None:
        """Take one delta in."""
        ...

    def body(self) -> bytes:
        """The JSON of everything added."""
        ...


class Responder:
    """Runs jobs and writes their answers.

    Args:
        engine: where they run.
        model: whose tokens they are.
        metrics: told each time to first token.
        final_check: checks texts whose constraint could not be enforced exactly; None where that is refused.
    """

    def __init__(
        self, engine: Engine, model: ServedModel, metrics: Metrics, final_check: FinalCheck | None = None
    ) -> None:
        self._engine = engine
        self._model = model
        self._metrics = metrics
        self._final_check = final_check

    async def whole(self, http: web.Request, job: Job, form: WholeForm) -> web.Response:
        """Answer with one body.

        `Server-Timing` covers received → first token handed to this side, and apart from that `decode`: first token →
        last.

        Raises:
            PDError: the job failed; nothing has been sent.
        """
        await self._generate(job, _WholeSink(job, form))
        # A one-token answer (every prefill leg) is answered now; a longer one was under way since its first token.
        job.timeline.mark(Event.ANSWERED)
        job.timeline.mark(Event.COMPLETED)
        body = form.body()
        headers = {"Content-Type": error_body.CONTENT_TYPE, **answer_headers(http, job)}
        self._metrics.observe_ttft(job.kind, stages_s(job.timeline))
        return web.Response(body=body, headers=headers)

    async def stream(self, http: web.Request, job: Job, form: StreamForm) -> web.StreamResponse:
        """Answer with events, beginning when the first token is there.

        Raises:
            PDError: the job failed before its first token; nothing has been sent. Later failures become an `error`
                event, after which the stream ends without its end marker.
        """
        sink = _StreamSink(http, job, form, self._metrics)
        try:
            await self._generate(job, sink)
            return await sink.close()
        except ConnectionError:
            # The client left while we wrote; generating has been aborted on the way out.
            return sink.response or web.Response()
        except Exception as error:
            if sink.response is None:
                raise
            _log.warning("stream.failed", request_id=job.answer_id, error=repr(error))
            return await sink.fail(error)

    async def _generate(self, job: Job, sink: Sink) -> None:
        constraint = job.requests[0].constraint
        if self._final_check is not None and constraint is not None:
            sink = CheckingSink(sink, self._final_check, constraint)
        await generate(self._engine, job.requests, self._model.tokenizer, sink)


class _WholeSink:
    def __init__(self, job: Job, form: WholeForm) -> None:
        self._job = job
        self._form = form

    async def push(self, delta: ChoiceDelta) -> None:
        """Add one delta to the body."""
        if delta.finish is None:
            self._job.timeline.mark(Event.ANSWERED)
        self._form.add(delta)


class _StreamSink:
    """Writes events as they come; several prompts push at the same time."""

    def __init__(self, http: web.Request, job: Job, form: StreamForm, metrics: Metrics) -> None:
        self.response: web.StreamResponse | None = None
        self._http = http
        self._job = job
        self._form = form
        self._metrics = metrics
        self._lock = asyncio.Lock()

    async def push(self, delta: ChoiceDelta) -> None:
        """Write one delta, and the head before the first."""
        data = b"".join(map(sse.encode_event, self._form.events(delta)))
        async with self._lock:
            response = self.response or await self._open()
            if data:
                await response.write(data)

    async def close(self) -> web.StreamResponse:
        """Write what follows the last delta, and the end marker."""
        response = self.response or await self._open()
        await response.write_eof(b"".join(map(sse.encode_event, self._form.closing_events())) + sse.DONE)
        return response

    async def fail(self, error: Exception) -> web.StreamResponse:
        """Write the error in the place of the end marker."""
        response = self.response or await self._open()
        await response.write_eof(sse.encode_event(error_body.error_answer(error).body))
        return response

    async def _open(self) -> web.StreamResponse:
        """Send status and headers: from here on nothing but an event can tell of a failure."""
        self._job.timeline.mark(Event.ANSWERED)
        self._metrics.observe_ttft(self._job.kind, stages_s(self._job.timeline))
        response = web.StreamResponse(headers={**STREAM_HEADERS, **answer_headers(self._http, self._job)})
        await response.prepare(self._http)
        self.response = response
        return response


def answer_headers(http: web.Request, job: Job) -> Mapping[str, str]:
    """The request's label, echoed, and the stages so far."""
    stages = whole_s(job.timeline) if Event.COMPLETED in job.timeline.at_s else stages_s(job.timeline)
    return {
        REQUEST_ID: http.headers.get(REQUEST_ID, job.answer_id),
        timing.HEADER: timing.encode(stages),
    }

"""An engine's spans: its part of a request that somebody else began to trace (journey rows 4 to 9, from inside).

Owns: turning a timeline into spans, and the middleware that sees every request begin and end. A request whose caller
does not trace it costs one look at a header. Does not know: what a stage is; how spans reach the collector.
"""

import asyncio
import http.client
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from common.clock import Clock
from common.telemetry.timeline import STAGES, Event, Timeline
from common.tracing.context import ANSWER_HEADER, HEADER, TraceContext, follow, new_span_id
from common.tracing.exporter import TraceExporter
from common.tracing.span import Span

_TIMELINE = web.RequestKey("timeline", Timeline)
_CONTEXT = web.RequestKey("trace", TraceContext)
_LEFT = 499
_WITHIN_S = 5.0
_OUTPUT = "output"
"""From the first token handed to the socket to the end of the answer."""


class EngineTraces:
    """Makes the spans of one engine.

    Args:
        role: `prefill` or `decode`; first part of every span's name.
        exporter: takes the spans.
        clock: the timelines' own.
    """

    def __init__(self, role: str, exporter: TraceExporter, clock: Clock) -> None:
        self._role = role
        self._exporter = exporter
        self._clock = clock

    def middleware(self) -> Middleware:
        """To be the outermost one, so that errors have become answers."""

        @web.middleware
        async def trace(request: web.Request, handler: Handler) -> web.StreamResponse:
            """Handle the request; where its caller samples it, make the spans of it."""
            context = follow(request.headers.get(HEADER))
            if context is None:
                return await handler(request)
            request[_CONTEXT] = context
            started_s, status = self._clock.now_s(), _LEFT
            try:
                response = await handler(request)
                status = response.status
                return response
            finally:
                times_s = (started_s, self._clock.now_s())
                self._exporter.add(spans(context, self._role, request, times_s, status))

        return trace


def attach(request: web.Request, timeline: Timeline) -> None:
    """The request's own timeline, for its spans."""
    if _CONTEXT in request:
        request[_TIMELINE] = timeline


async def announce(request: web.Request, response: web.StreamResponse) -> None:
    """For `on_response_prepare`: say that this request has spans of its own here."""
    context = request.get(_CONTEXT)
    if context is not None:
        response.headers[ANSWER_HEADER] = context.traceparent


def spans(
    context: TraceContext, role: str, request: web.Request, times_s: tuple[float, float], status: int
) -> list[Span]:
    """The request's span, and one per stage of its timeline that happened.

    Stages are the timeline's: `grammar`, `queue`, `pull`, `compute` (P: the prefill; D: up to the first token), … and
    `output` for all that came after the first token was handed to the socket.
    """
    start_s, end_s = times_s
    whole = Span(
        context=context,
        span_id=context.span_id,
        parent_id=context.parent_id,
        name=f"{role} {request.path}",
        start_s=start_s,
        end_s=end_s,
        is_server=True,
        is_error=status >= 500,
        attributes={"http.route": request.path, "http.response.status_code": status},
    )
    timeline = request.get(_TIMELINE)
    stages = [] if timeline is None else _stages(timeline, end_s)
    return [whole, *(_stage(context, f"{role}.{name}", from_s, to_s) for name, from_s, to_s in stages)]


def _stages(timeline: Timeline, end_s: float) -> list[tuple[str, float, float]]:
    """(name, start, end) of every stage, end to end as `STAGES` has it."""
    found = []
    last_s = timeline.at_s[Event.RECEIVED]
    for name, event in STAGES:
        at_s = timeline.at_s.get(event)
        if at_s is not None:
            found.append((name, last_s, max(last_s, at_s)))
            last_s = max(last_s, at_s)
    if Event.ANSWERED in timeline.at_s:
        found.append((_OUTPUT, last_s, max(last_s, end_s)))
    return found


def _stage(context: TraceContext, name: str, start_s: float, end_s: float) -> Span:
    return Span(
        context=context, span_id=new_span_id(), parent_id=context.span_id, name=name, start_s=start_s, end_s=end_s
    )


class ThreadedCollector:
    """An engine's way to its collector: `http.client` on a thread, a connection per batch (one a second at most).

    Args:
        url: the collector's endpoint, e.g. `http://localhost:4318/v1/traces`.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._path = parts.path or "/v1/traces"

    async def post(self, body: bytes) -> int:
        """POST it; the status.

        Raises:
            OSError: no connection, or no answer.
        """
        return await asyncio.to_thread(self._post, body)

    def close(self) -> None:
        """Nothing is held between two posts."""

    def _post(self, body: bytes) -> int:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_WITHIN_S)
        try:
            connection.request("POST", self._path, body, {"Content-Type": "application/json"})
            return connection.getresponse().status
        except http.client.HTTPException as error:
            raise OSError(repr(error)) from error
        finally:
            connection.close()

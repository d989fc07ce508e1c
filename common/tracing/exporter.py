"""Sends spans to a collector: OTLP over HTTP in JSON, in batches, in the background.

Owns: the queue (bounded: what does not fit is dropped and counted), the JSON, when it is sent.
Does not know: what spans mean. Source: OpenTelemetry protocol 1.3, HTTP with JSON encoding.
"""

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Protocol

import msgspec
import structlog

from common.clock import Clock
from common.tracing.span import Span, Value

_log = structlog.get_logger(__name__)
_MAX_WAITING = 8192
_MAX_BATCH = 512
_EVERY_S = 1.0
_WITHIN_S = 5.0
_KINDS = {True: 2, False: 3}  # SPAN_KIND_SERVER, SPAN_KIND_CLIENT


class Collector(Protocol):
    """The way to a collector."""

    async def post(self, body: bytes) -> int:
        """POST one JSON document; the status of the answer. Raises `OSError` where there is none."""
        ...

    def close(self) -> None:
        """Nothing more is coming."""
        ...


class TraceExporter:
    """The exporter.

    Args:
        collector: where spans go.
        service: the service's name.
        clock: to turn monotonic times into wall-clock ones.
    """

    def __init__(self, collector: Collector, service: str, clock: Clock) -> None:
        self._collector = collector
        self._service = service
        # One offset for the life of the process: spans of one trace must not jump when the wall clock is set.
        self._offset_s = clock.wall_s() - clock.now_s()
        self._waiting: deque[Span] = deque(maxlen=_MAX_WAITING)
        self._has_some = asyncio.Event()
        self._is_failing = False
        self.num_dropped = 0

    def add(self, spans: Iterable[Span]) -> None:
        """Queue spans; never waits."""
        for span in spans:
            self.num_dropped += len(self._waiting) == _MAX_WAITING
            self._waiting.append(span)
        self._has_some.set()

    async def run(self) -> None:
        """Export until cancelled."""
        try:
            while True:
                await self._has_some.wait()
                await asyncio.sleep(_EVERY_S)  # for more to come
                self._has_some.clear()
                await self.flush()
        finally:
            self._collector.close()

    async def flush(self) -> None:
        """Send what waits; what cannot be sent is dropped."""
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(_MAX_BATCH, len(self._waiting)))]
            try:
                async with asyncio.timeout(_WITHIN_S):
                    status = await self._collector.post(self._document(batch))
            except (OSError, TimeoutError) as error:
                self._failed(batch, repr(error))
                return
            if status >= 300:
                self._failed(batch, f"status {status}")
                return
            self._is_failing = False

    def _failed(self, batch: list[Span], reason: str) -> None:
        self.num_dropped += len(batch)
        if not self._is_failing:
            self._is_failing = True
            _log.warning("traces.not_exported", reason=reason, num_spans=len(batch))

    def _document(self, batch: list[Span]) -> bytes:
        resource = {"attributes": [_attribute("service.name", self._service)]}
        scope = {"scope": {"name": "pd-serve"}, "spans": [self._span(span) for span in batch]}
        return msgspec.json.encode({"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]})

    def _span(self, span: Span) -> dict[str, object]:
        result: dict[str, object] = {
            "traceId": span.context.trace_id,
            "spanId": span.span_id,
            "name": span.name,
            "kind": _KINDS[span.is_server],
            "startTimeUnixNano": self._nanos(span.start_s),
            "endTimeUnixNano": self._nanos(span.end_s),
            "attributes": [_attribute(name, value) for name, value in span.attributes.items()],
            "status": {"code": 2 if span.is_error else 0},
        }
        if span.parent_id is not None:
            result["parentSpanId"] = span.parent_id
        return result

    def _nanos(self, seconds: float) -> str:
        return str(round((seconds + self._offset_s) * 1e9))


def _attribute(name: str, value: Value) -> dict[str, object]:
    if isinstance(value, bool):
        return {"key": name, "value": {"boolValue": value}}
    if isinstance(value, int):
        return {"key": name, "value": {"intValue": str(value)}}
    if isinstance(value, float):
        return {"key": name, "value": {"doubleValue": value}}
    return {"key": name, "value": {"stringValue": value}}

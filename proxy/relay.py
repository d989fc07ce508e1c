"""D's bytes to the client, as they arrive (journey row 9).

Owns: the client's response: head, body, the optional timeline, a well-formed end whatever happens to D.
Does not know: what the bytes say, except where a client asked for its timeline.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import msgspec

from common.errors import UpstreamError, UpstreamTimeout
from common.openai import sse
from common.openai.error_body import error_answer
from common.wire import timing
from proxy.call import TIMELINE, Call
from proxy.decode_leg import Started
from proxy.http1.exchange import Exchange, Reply
from proxy.incoming import REQUEST_ID
from proxy.time_limits import TimeLimits
from proxy.ttft import Breakdown, to_json
from proxy.upstream import Answer

_SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_KEPT_HEADERS = ("Content-Type", "Retry-After", "WWW-Authenticate")
_END = sse.DONE_LINE.removeprefix(b"data: ")
_STALLED_CLIENT_S = 1.0


class _ChunkHead(msgspec.Struct):
    id: msgspec.Raw = msgspec.Raw(b'""')
    object: msgspec.Raw = msgspec.Raw(b'""')
    created: msgspec.Raw = msgspec.Raw(b"0")
    model: msgspec.Raw = msgspec.Raw(b'""')


class HttpClient:
    """The client of one request, over HTTP.

    Args:
        http: the client's request.
        call: the same, as the journey sees it.
        limits: for the next one.
        stream_idle_s: longest silence of D that is waited out.
        headers: sent with every answer (CORS).

    Attributes:
        is_streaming: whether an event stream has begun.
    """

    def __init__(
        self,
        http: Exchange,
        call: Call,
        limits: TimeLimits,
        stream_idle_s: float,
        headers: Mapping[str, str],
    ) -> None:
        self._limits = limits
        self._http = http
        self._call = call
        self._stream_idle_s = stream_idle_s
        self._headers = headers
        self._tail = sse.StreamTail()
        self._error_event: Callable[[Exception], bytes] = _openai_error_event
        self.is_streaming = False

    async def pass_on(self, started: Started, breakdown: Breakdown, notes: Mapping[str, object]) -> None:
        """Send all of D's answer.

        Raises:
            UpstreamError: D broke off; the client has been told by an error event.
            ConnectionResetError: the client went away.
        """
        timeline = to_json(breakdown, notes) if self._call.wants_timeline else None
        content_type = started.answer.headers.get("content-type", "application/json")
        if not started.is_stream:
            body = started.first if timeline is None else with_timeline(started.first, timeline)
            self.send_whole(body, breakdown, started.answer.status, content_type)
            return
        self.begin_stream(breakdown, started.answer.status, content_type)
        await self._stream(started, _Passing() if timeline is None else _Inserting(timeline))

    def send_whole(
        self, body: bytes, breakdown: Breakdown, status: int = 200, content_type: str = "application/json"
    ) -> None:
        """Answer in one piece."""
        self._http.send(Reply(body, status, self._head(breakdown, content_type)))

    def begin_stream(self, breakdown: Breakdown, status: int = 200, content_type: str = sse.CONTENT_TYPE) -> None:
        """Begin an event stream; its head leaves with the first bytes of its body."""
        self._http.begin(status, {**self._head(breakdown, content_type), **_SSE_HEADERS})
        self.is_streaming = True

    async def write(self, event: bytes) -> None:
        """One complete event of a stream that has begun."""
        self._tail.push(event)
        self._http.write(event)
        if self._http.is_paused:
            await self._http.drain()

    def end(self, last: bytes = b"") -> None:
        """The end of a stream that has begun."""
        self._http.end(last)

    def write_error_as(self, event: Callable[[Exception], bytes]) -> None:
        """Use another form than OpenAI's for the event that tells of a failure."""
        self._error_event = event

    async def break_off(self, error: Exception) -> None:
        """Tell the client in the form of its stream that there is no more to come, and end it."""
        self._http.end(self._tail.separator + self._error_event(error))
        try:
            async with asyncio.timeout(_STALLED_CLIENT_S):
                await self._http.drain()
        except TimeoutError:
            self._http.wire.abort()

    def _head(self, breakdown: Breakdown, content_type: str) -> dict[str, str]:
        return {
            REQUEST_ID: self._call.request_id,
            timing.HEADER: timing.encode(breakdown.shown_s()),
            "Content-Type": content_type,
            **self._headers,
        }

    async def _stream(self, started: Started, passing: "_Passing") -> None:
        http, tail, idle_s = self._http, self._tail, self._stream_idle_s

        def push(chunk: bytes, is_last: bool) -> bool:
            """Pass one piece of D's stream on; whether the client takes more at once."""
            out = passing.push(chunk)
            tail.push(out)
            if is_last:
                # The last bytes and the end of the body leave in one piece.
                http.end(out + passing.end())
            else:
                http.write(out)
            limit.renew(idle_s)
            return not http.is_paused

        try:
            with self._limits.limit(idle_s) as limit:
                push(started.first, started.answer.is_at_end)
                while not http.is_ended:
                    if http.is_paused:
                        await http.drain()
                    await started.answer.pump(push)
        except TimeoutError as error:
            raise UpstreamTimeout("the decode engine fell silent") from error
        except UpstreamError:
            # Everything the client waits for is through; that the connection then broke is no business of its.
            if not self._tail.is_done:
                raise
            http.end()


def _openai_error_event(error: Exception) -> bytes:
    return sse.encode_event(error_answer(error).body)


async def payloads_of(started: Started, idle_s: float) -> AsyncIterator[bytes]:
    """The payloads of D's stream, one by one, without its end marker.

    Raises:
        UpstreamError: D broke off or fell silent.
    """
    parser = sse.SseParser()
    chunk = started.first
    while chunk:
        for payload in parser.push(chunk):
            if payload != _END:
                yield payload
        try:
            async with asyncio.timeout(idle_s):
                chunk = await started.answer.read_some()
        except TimeoutError as error:
            raise UpstreamTimeout("the decode engine fell silent") from error


class _Passing:
    """Bytes in, the same bytes out."""

    def push(self, chunk: bytes) -> bytes:
        """What may go out now."""
        return chunk

    def end(self) -> bytes:
        """What goes out after the last chunk."""
        return b""


class _Inserting(_Passing):
    """Bytes in, the same bytes out, with one more event in front of `[DONE]`.

    Args:
        timeline: the JSON of the `timeline` member.
    """

    def __init__(self, timeline: bytes) -> None:
        self._timeline = timeline
        self._hold = sse.DoneHold()
        self._parser = sse.SseParser()
        self._head: _ChunkHead | None = None

    def push(self, chunk: bytes) -> bytes:
        """What may go out now."""
        if self._head is None:
            payloads = self._parser.push(chunk)
            if payloads:
                self._head = _head_of(payloads[0])
        return self._hold.push(chunk)

    def end(self) -> bytes:
        """The extra event and the marker; only the rest where no marker came."""
        rest = self._hold.release()
        return self._event() + rest if self._hold.found else rest

    def _event(self) -> bytes:
        head = msgspec.json.encode(self._head or _ChunkHead())
        return sse.encode_event(head[:-1] + b',"choices":[],"timeline":' + self._timeline + b"}")


def _head_of(payload: bytes) -> _ChunkHead:
    try:
        return msgspec.json.decode(payload, type=_ChunkHead)
    except msgspec.MsgspecError:
        return _ChunkHead()


def with_timeline(body: bytes, timeline: bytes) -> bytes:
    """The JSON object `body` with one more member; anything that is no object stays as it is."""
    stripped = body.rstrip()
    if not stripped.startswith(b"{") or not stripped.endswith(b"}"):
        return body
    separator = b"," if stripped[1:-1].strip() else b""
    return stripped[:-1] + separator + msgspec.json.encode(TIMELINE) + b":" + timeline + b"}"


def passed_through(answer: Answer) -> Reply:
    """An engine's complete answer as it came, with the headers that mean something to a client."""
    kept = {name: value for name in _KEPT_HEADERS if (value := answer.headers.get(name.lower())) is not None}
    return Reply(answer.body, answer.status, kept)

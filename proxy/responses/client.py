"""The client of a Responses request: takes D's chat answer, passes on a Responses answer.

Owns: reading the chat stream event by event. Does not know: journeys.
"""

from collections.abc import Mapping

import msgspec

from proxy.decode_leg import Started
from proxy.relay import HttpClient, payloads_of
from proxy.responses.answer import whole_answer
from proxy.responses.stream import EventStream
from proxy.ttft import Breakdown


class ResponsesClient:
    """Stands between a journey and the HTTP client.

    Args:
        http: where the answer goes.
        echoed: the request's fields that the answer repeats.
        stream_idle_s: longest silence of D that is waited out.
    """

    def __init__(self, http: HttpClient, echoed: Mapping[str, msgspec.Raw], stream_idle_s: float) -> None:
        self._http = http
        self._echoed = echoed
        self._idle_s = stream_idle_s
        self._events = EventStream(echoed)

    async def pass_on(self, started: Started, breakdown: Breakdown, notes: Mapping[str, object]) -> None:  # noqa: ARG002 - the port's signature
        """Send all of D's answer, translated.

        Raises:
            UpstreamError: D broke off.
        """
        if not started.is_stream:
            self._http.send_whole(whole_answer(started.first, self._echoed), breakdown)
            return
        self._http.write_error_as(self._events.error)
        self._http.begin_stream(breakdown)
        async for payload in payloads_of(started, self._idle_s):
            events = self._events.chunk(payload)
            if events:
                await self._http.write(events)
        self._http.end(self._events.end())

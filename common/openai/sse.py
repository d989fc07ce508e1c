"""Server-sent events: framing, an incremental parser, and looking at a stream without parsing it (journey row 9).

Owns: the bytes of `text/event-stream` as OpenAI uses it. Does not know: what the events say.
"""

CONTENT_TYPE = "text/event-stream"
DONE_LINE = b"data: [DONE]"
DONE = DONE_LINE + b"\n\n"
_TAIL_BYTES = len(DONE) + 2


def encode_event(data: bytes) -> bytes:
    """One event with `data` (JSON without raw newlines) as its payload."""
    return b"data: " + data + b"\n\n"


class SseParser:
    """Payloads of the `data` field, event by event, however the bytes were cut.

    Comments, `event`, `id` and `retry` are skipped; several `data` lines of one event are joined by a newline.
    Source: WHATWG HTML, section 9.2.6; lines may end in CR, LF or CRLF.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def push(self, chunk: bytes) -> list[bytes]:
        """Payloads of the events that `chunk` completes; changes the parser's memory of half-read ones."""
        buffer = self._rest + chunk
        # A CR at the very end may be the first half of CRLF: wait for what follows.
        held = b"\r" if buffer.endswith(b"\r") else b""
        buffer = buffer[: len(buffer) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = buffer.split(b"\n")
        self._rest = rest + held
        payloads = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                payloads.append(b"\n".join(self._data))
                self._data = []
        return payloads


class StreamTail:
    """The last few bytes of a relayed stream: enough to know where it broke off, at no cost per event."""

    def __init__(self) -> None:
        self._tail = b""

    def push(self, chunk: bytes) -> None:
        """Remember the end of what was relayed."""
        self._tail = chunk[-_TAIL_BYTES:] if len(chunk) >= _TAIL_BYTES else (self._tail + chunk)[-_TAIL_BYTES:]

    @property
    def is_done(self) -> bool:
        """Whether the stream's own end marker went through."""
        return self._tail.rstrip(b"\r\n").endswith(DONE_LINE)

    @property
    def separator(self) -> bytes:
        """What must be written so that the next event starts on its own, whatever was cut off before it."""
        tail = self._tail.replace(b"\r\n", b"\n")
        if not tail or tail.endswith(b"\n\n"):
            return b""
        return b"\n" if tail.endswith(b"\n") else b"\n\n"


class DoneHold:
    """Lets a stream pass and stops in front of its `data: [DONE]` line, also when that line arrives in pieces."""

    def __init__(self) -> None:
        self._held = b""
        self._mid_line = False
        self.found = False

    def push(self, chunk: bytes) -> bytes:
        """The part of everything held so far that may go out now."""
        buffer = self._held + chunk
        if self.found:
            self._held = buffer
            return b""
        start = self._find(buffer)
        if start is not None:
            self.found = True
        else:
            start = self._start_of_possible_marker(buffer)
        self._held = buffer[start:]
        passed = buffer[:start]
        if passed:
            self._mid_line = not passed.endswith((b"\n", b"\r"))
        return passed

    def release(self) -> bytes:
        """What was held back: the marker and all after it, or the beginning of a line that never became one."""
        held, self._held = self._held, b""
        return held

    def _find(self, buffer: bytes) -> int | None:
        if not self._mid_line and buffer.startswith(DONE_LINE):
            return 0
        at = max(buffer.find(b"\n" + DONE_LINE), buffer.find(b"\r" + DONE_LINE))
        return None if at < 0 else at + 1

    def _start_of_possible_marker(self, buffer: bytes) -> int:
        start = max(buffer.rfind(b"\n"), buffer.rfind(b"\r")) + 1
        at_line_start = start > 0 or not self._mid_line
        return start if at_line_start and DONE_LINE.startswith(buffer[start:]) else len(buffer)

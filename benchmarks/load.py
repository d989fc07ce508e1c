"""A load generator that costs little: raw sockets, one fixed request, many connections, latencies of whole answers.

Owns: the loop and its numbers. It understands just enough HTTP/1.1 to know where an answer ends.
"""

import asyncio
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_HEAD_END = b"\r\n\r\n"
_CHUNKED_END = b"\r\n0\r\n\r\n"


@dataclass
class Load:
    """What came out of one run.

    Attributes:
        latencies_s: one per answered request.
        seconds: how long the run took.
        num_errors: answers that were no 200, and broken connections.
    """

    latencies_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    num_errors: int = 0

    @property
    def per_second(self) -> float:
        """Answered requests per second."""
        return len(self.latencies_s) / self.seconds

    def quantile_ms(self, share: float) -> float:
        """The latency that `share` of the requests stay below."""
        ordered = sorted(self.latencies_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1000 if ordered else float("nan")


def request_bytes(url: str, body: bytes) -> bytes:
    """A POST of JSON, ready to be written."""
    parts = urlsplit(url)
    head = f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> int:
    """Send `request` and read its whole answer; the status."""
    writer.write(request)
    head = await reader.readuntil(_HEAD_END)
    lines = head.lower().split(b"\r\n")
    length = next((int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:")), None)
    if length is not None:
        await reader.readexactly(length)
    else:
        tail = b"\r\n"
        while not tail.endswith(_CHUNKED_END):
            piece = await reader.read(65536)
            if not piece:
                raise ConnectionError("the answer broke off")
            tail = (tail + piece)[-len(_CHUNKED_END) :]
    return int(head[9:12])


async def press(legs: list[str], body: bytes, *, num_connections: int, seconds: float) -> Load:
    """Ask each URL of `legs` in turn (one request is all of them) over `num_connections`, for `seconds`."""
    load = Load()
    end_s = time.perf_counter() + seconds
    started_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(num_connections):
            group.create_task(_press_one(legs, body, end_s, load))
    load.seconds = time.perf_counter() - started_s
    return load


async def _press_one(legs: list[str], body: bytes, end_s: float, load: Load) -> None:
    connections = []
    for url in legs:
        parts = urlsplit(url)
        connections.append((*await asyncio.open_connection(parts.hostname, parts.port), request_bytes(url, body)))
    while time.perf_counter() < end_s:
        begun_s = time.perf_counter()
        try:
            statuses = [await ask(*connection) for connection in connections]
        except (ConnectionError, asyncio.IncompleteReadError):
            load.num_errors += 1
            break
        if any(status != 200 for status in statuses):
            load.num_errors += 1
            continue
        load.latencies_s.append(time.perf_counter() - begun_s)
    for _, writer, _ in connections:
        writer.close()

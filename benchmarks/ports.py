"""Ports of children: finding a free one, waiting until something answers there."""

import socket
import time
import urllib.error
import urllib.request

READY_WITHIN_S = 30.0


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_ready(url: str, body: bytes | None = None) -> None:
    """Ask until an answer comes."""
    end_s = time.monotonic() + READY_WITHIN_S
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                answer.read()
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            if time.monotonic() > end_s:
                raise
            time.sleep(0.1)

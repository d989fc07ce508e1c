"""Many open streams through one proxy process: errors, memory per stream, how late its event loop runs.

Part of `pd-bench overhead --streams N`.
"""

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path

import uvloop
from rich.console import Console

from benchmarks import scrape
from benchmarks.deployment import stopped_at_the_end
from benchmarks.load import ask, request_bytes
from benchmarks.ports import free_port, wait_ready
from proxy.server import allow_many_sockets

BODY = b'{"model":"m","prompt":"hello","stream":true}'
_OPEN_AT_ONCE = 200
_LAG_METRIC = "pd_proxy_loop_lag_seconds_bucket"


def run(proxy_url: str, pid: int, num_streams: int, console: Console) -> int:
    """Hold `num_streams` streams open until each has ended by itself; 1 if one of them failed."""
    allow_many_sockets()
    before_bytes = _resident_bytes(pid)
    results: list[str] = []
    peak_bytes = uvloop.run(_hold(proxy_url, num_streams, results, pid))
    errors = [result for result in results if result != "200"]
    per_stream_kib = (peak_bytes - before_bytes) / num_streams / 1024
    console.print(f"{num_streams} streams: {len(errors)} errors, {per_stream_kib:.1f} KiB per stream in the proxy")
    console.print(f"event-loop lag p99 at most {_lag_p99_ms(proxy_url):.1f} ms")
    for error in sorted(set(errors))[:5]:
        console.print(f"  {error}")
    return int(bool(errors))


async def _hold(url: str, num_streams: int, results: list[str], pid: int) -> int:
    peak_bytes = 0
    gate = asyncio.Semaphore(_OPEN_AT_ONCE)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_one(url, gate, results)) for _ in range(num_streams)]
        while not all(task.done() for task in tasks):
            peak_bytes = max(peak_bytes, _resident_bytes(pid))
            await asyncio.sleep(0.5)
    return peak_bytes


def _resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) * 1024


async def _one(url: str, gate: asyncio.Semaphore, results: list[str]) -> None:
    try:
        async with gate:
            reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split("/")[0].split(":"))
        results.append(str(await ask(reader, writer, request_bytes(url, BODY))))
        writer.close()
    except (OSError, asyncio.IncompleteReadError) as error:
        results.append(repr(error))


def _lag_p99_ms(url: str) -> float:
    base = "/".join(url.split("/")[:3])
    up_to = scrape.by_label(base, _LAG_METRIC, "le")
    return next(float(bound) for bound, count in up_to.items() if count >= 0.99 * up_to["+Inf"]) * 1000


def measure(num_streams: int, seconds: float, console: Console) -> int:
    """Start slow mocks and a proxy of their own, and hold the streams; the exit status."""
    p, d, port = free_port(), free_port(), free_port()
    with tempfile.TemporaryDirectory() as folder, stopped_at_the_end() as children:
        config = Path(folder) / "proxy.yaml"
        fleet = f"{{prefill: ['http://127.0.0.1:{p}'], decode: ['http://127.0.0.1:{d}'], probe_timeout_s: 10}}"
        config.write_text(f"proxy: {{port: {port}, fleet: {fleet}, log_level: error, drain_s: 1}}\n")
        mock = [sys.executable, "-m", "benchmarks.mock_engine"]
        commands = [[*mock, str(p), "P"], [*mock, str(d), "D", str(round(seconds)), "1"]]
        commands.append([sys.executable, "-m", "proxy", "--config", str(config)])
        children += [subprocess.Popen(command, stderr=subprocess.DEVNULL) for command in commands]
        wait_ready(f"http://127.0.0.1:{port}/ready")
        return run(f"http://127.0.0.1:{port}/v1/completions", children[-1].pid, num_streams, console)

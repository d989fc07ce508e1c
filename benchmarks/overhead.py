"""`pd-bench overhead`: what a proxy adds to two legs, with engines that cost next to nothing.

Every target stands in front of the same mock P and D; "added" is its latency beyond asking P and D one after the other
without any proxy. Runs are interleaved, so that a slow moment of the machine hits all targets alike.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks import streams
from benchmarks.load import Load, press
from benchmarks.ports import free_port, wait_ready

BODY = b'{"model":"m","prompt":"hello world this is a prompt","max_tokens":20,"temperature":0.7,"stream":true}'
PATH = "/v1/completions"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the benchmark."""
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one run")
    parser.add_argument("--rounds", type=int, default=3, help="runs per target and load, interleaved")
    parser.add_argument("--connections", type=int, default=32, help="connections of the throughput runs")
    parser.add_argument("--chunks", type=int, default=20, help="events per stream")
    parser.add_argument("--streams", type=int, default=0, help="instead: hold this many streams open at a time")
    parser.add_argument("--hold", type=float, default=60.0, help="seconds each of them stays open")
    parser.add_argument("--relay", type=Path, help="a plain relay script to measure beside (needs $PD_PEERS)")


def run(args: argparse.Namespace) -> int:
    """Measure and print; 1 if any request failed."""
    console = Console()
    if args.streams:
        return streams.measure(args.streams, args.hold, console)
    with tempfile.TemporaryDirectory() as folder, _targets(args, Path(folder), console) as targets:
        alone: dict[str, list[Load]] = {name: [] for name in targets}
        crowded: dict[str, list[Load]] = {name: [] for name in targets}
        for _ in range(args.rounds):
            for name, legs in targets.items():
                alone[name].append(_press(legs, 1, args.seconds))
            for name, legs in targets.items():
                crowded[name].append(_press(legs, args.connections, args.seconds))
    console.print(_table(alone, crowded, args.connections))
    return int(any(load.num_errors for loads in (*alone.values(), *crowded.values()) for load in loads))


def _press(legs: list[str], num_connections: int, seconds: float) -> Load:
    load: Load = uvloop.run(press(legs, BODY, num_connections=num_connections, seconds=seconds))
    return load


def _table(alone: dict[str, list[Load]], crowded: dict[str, list[Load]], num_connections: int) -> Table:
    table = Table(title="proxy overhead, mock engines")
    heads = ("target", "p50 ms", "p99 ms", "added p50", "added p99", f"req/s at {num_connections}", "errors")
    for head in heads:
        table.add_column(head, justify="left" if head == "target" else "right")
    base = _best(alone["no proxy"])
    for name in alone:
        quiet, busy = _best(alone[name]), max(crowded[name], key=lambda load: load.per_second)
        errors = sum(load.num_errors for load in (*alone[name], *crowded[name]))
        numbers = [quiet.quantile_ms(0.5), quiet.quantile_ms(0.99)]
        added = [quiet.quantile_ms(share) - base.quantile_ms(share) for share in (0.5, 0.99)]
        cells = [f"{number:.2f}" for number in (*numbers, *added)]
        table.add_row(name, *cells, f"{busy.per_second:.0f}", str(errors))
    return table


def _best(loads: list[Load]) -> Load:
    """The run that other work on the machine disturbed least."""
    return min(loads, key=lambda load: load.quantile_ms(0.5))


@contextmanager
def _targets(args: argparse.Namespace, folder: Path, console: Console) -> Iterator[dict[str, list[str]]]:
    """Start the mocks and every proxy there is; yields name → URLs to ask per request."""
    children: list[subprocess.Popen[bytes]] = []
    p, d = f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
    targets = {"no proxy": [p + PATH, d + PATH]}
    try:
        for url, role in ((p, "P"), (d, "D")):
            mock = [sys.executable, "-m", "benchmarks.mock_engine", url.rsplit(":", 1)[1], role, str(args.chunks)]
            children.append(subprocess.Popen(mock))
            wait_ready(url + "/ready")
        for name, (port, command) in _proxies(args, folder, p, d, console).items():
            children.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            wait_ready(f"http://127.0.0.1:{port}{PATH}", BODY)
            targets[name] = [f"http://127.0.0.1:{port}{PATH}"]
        yield targets
    finally:
        for child in children:
            child.terminate()
        for child in children:
            child.wait(timeout=10)


def _proxies(
    args: argparse.Namespace, folder: Path, p: str, d: str, console: Console
) -> dict[str, tuple[int, list[str]]]:
    ours = free_port()
    config = folder / "proxy.yaml"
    fleet = f"{{prefill: ['{p}'], decode: ['{d}']}}"
    config.write_text(f"proxy: {{port: {ours}, fleet: {fleet}, log_level: error, drain_s: 1}}\n")
    commands = {"pd-proxy": (ours, [sys.executable, "-m", "proxy", "--config", str(config)])}
    peers = os.environ.get("PD_PEERS")
    if peers is None:
        console.print("vllm-router and the plain relay are left out: PD_PEERS is not set")
        return commands
    router = Path(peers) / "router/bin/vllm-router"
    if router.exists():
        port, metrics = free_port(), free_port()
        command = [str(router), "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
        command += ["--vllm-pd-disaggregation", "--kv-connector", "nixl", "--policy", "round_robin"]
        commands["vllm-router"] = (port, [*command, "--prefill", p, "--decode", d])
    if args.relay is not None:
        port = free_port()
        python = str(Path(peers) / "vllm/bin/python")
        command = [python, str(args.relay), "--port", str(port), "--prefill", p, "--decode", d]
        commands["plain relay"] = (port, command)
    else:
        console.print("the plain relay is left out: --relay names no script")
    return commands

"""`pd-bench overhead`: what a proxy adds to two legs, with engines that cost next to nothing.

Every target stands in front of the same mock P and D; "added" is its latency beyond asking P and D one after the other
without any proxy. Rounds are short and hold one run of every target, so that a slow moment of the machine hits all of
them alike: "added p50" is the median over the rounds of the difference to "no proxy" in the same round, "added p99" the
difference of the p99 over all rounds. The mocks count: "P legs" and "D legs" are what they saw per request sent.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks import streams
from benchmarks.deployment import stopped_at_the_end
from benchmarks.load import Load, press
from benchmarks.ports import free_port, wait_ready

BODY = b'{"model":"m","prompt":"hello world this is a prompt","max_tokens":20,"temperature":0.7,"stream":true}'
PATH = "/v1/completions"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the benchmark."""
    parser.add_argument("--seconds", type=float, default=1.0, help="length of one run")
    parser.add_argument("--rounds", type=int, default=12, help="runs per target and load, interleaved")
    parser.add_argument("--connections", type=int, default=32, help="connections of the throughput runs")
    parser.add_argument("--chunks", type=int, default=20, help="events per stream")
    parser.add_argument("--streams", type=int, default=0, help="instead: hold this many streams open at a time")
    parser.add_argument("--hold", type=float, default=60.0, help="seconds each of them stays open")
    parser.add_argument("--relay", type=Path, help="a plain relay script to measure beside (needs $PD_PEERS)")


@dataclass
class _Measured:
    """Runs of one target, one per round and load.

    Attributes:
        alone: with one connection.
        crowded: with many.
        num_legs: requests that P and D saw.
    """

    alone: list[Load] = field(default_factory=list)
    crowded: list[Load] = field(default_factory=list)
    num_legs: tuple[int, int] = (0, 0)

    @property
    def num_errors(self) -> int:
        """Requests that failed."""
        return sum(load.num_errors for load in (*self.alone, *self.crowded))

    @property
    def num_answered(self) -> int:
        """Requests that did not."""
        return sum(len(load.latencies_s) for load in (*self.alone, *self.crowded))


def run(args: argparse.Namespace) -> int:
    """Measure and print; 1 if any request failed."""
    console = Console(width=120)
    if args.streams:
        return streams.measure(args.streams, args.hold, console)
    with tempfile.TemporaryDirectory() as folder, _targets(args, Path(folder), console) as (engines, targets):
        measured = {name: _Measured() for name in targets}
        for _ in range(args.rounds):
            for name, legs in targets.items():
                _measure(measured[name], legs, engines, args)
    console.print(_table(measured, args.connections))
    return int(any(target.num_errors for target in measured.values()))


def _measure(measured: _Measured, legs: list[str], engines: list[str], args: argparse.Namespace) -> None:
    before = [_num_seen(url) for url in engines]
    measured.alone.append(_press(legs, 1, args.seconds))
    measured.crowded.append(_press(legs, args.connections, args.seconds))
    seen = [_num_seen(url) - count for url, count in zip(engines, before, strict=True)]
    measured.num_legs = (measured.num_legs[0] + seen[0], measured.num_legs[1] + seen[1])


def _num_seen(url: str) -> int:
    with urllib.request.urlopen(url + "/count") as answer:
        return int(answer.read())


def _press(legs: list[str], num_connections: int, seconds: float) -> Load:
    load: Load = uvloop.run(press(legs, BODY, num_connections=num_connections, seconds=seconds))
    return load


def _table(measured: dict[str, _Measured], num_connections: int) -> Table:
    table = Table(title="proxy overhead, mock engines")
    heads = (
        "target",
        "p50 ms",
        "p99 ms",
        "added p50",
        "added p99",
        f"req/s at {num_connections}",
        "P legs",
        "D legs",
        "errors",
    )
    for head in heads:
        table.add_column(head, justify="left" if head == "target" else "right")
    base = measured["no proxy"]
    base_p99_ms = pooled(base.alone).quantile_ms(0.99)
    for name, target in measured.items():
        quiet = pooled(target.alone)
        added = [median(added_ms(target.alone, base.alone)), quiet.quantile_ms(0.99) - base_p99_ms]
        cells = [f"{number:.2f}" for number in (quiet.quantile_ms(0.5), quiet.quantile_ms(0.99), *added)]
        per_second = median(load.per_second for load in target.crowded)
        legs = [f"{count / max(1, target.num_answered):.2f}" for count in target.num_legs]
        table.add_row(name, *cells, f"{per_second:.0f}", *legs, str(target.num_errors))
    return table


def added_ms(target: list[Load], base: list[Load]) -> list[float]:
    """Per round, how much longer the median request took than in the same round's `base`."""
    return [one.quantile_ms(0.5) - other.quantile_ms(0.5) for one, other in zip(target, base, strict=True)]


def pooled(loads: list[Load]) -> Load:
    """All rounds as one."""
    return Load([latency for load in loads for latency in load.latencies_s], sum(load.seconds for load in loads))


@contextmanager
def _targets(
    args: argparse.Namespace, folder: Path, console: Console
) -> Iterator[tuple[list[str], dict[str, list[str]]]]:
    """Start the mocks and every proxy there is; yields the mocks' URLs, and name → URLs to ask per request."""
    p, d = f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
    targets = {"no proxy": [p + PATH, d + PATH]}
    with stopped_at_the_end() as children:
        for url, role in ((p, "P"), (d, "D")):
            mock = [sys.executable, "-m", "benchmarks.mock_engine", url.rsplit(":", 1)[1], role, str(args.chunks)]
            children.append(subprocess.Popen(mock))
            wait_ready(url + "/ready")
        for name, (port, command) in _proxies(args, folder, p, d, console).items():
            children.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            wait_ready(f"http://127.0.0.1:{port}{PATH}", BODY)
            targets[name] = [f"http://127.0.0.1:{port}{PATH}"]
        yield [p, d], targets


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

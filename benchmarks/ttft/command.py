"""`pd-bench ttft`: what to measure, where, and where the results go.

Owns: the command line, the run itself, the terminal table.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.deployment import running_modes
from benchmarks.ttft import page
from benchmarks.ttft.beside import streams_beside
from benchmarks.ttft.cells import Cell, Constraints, body_of, load_schemas, rounds
from benchmarks.ttft.measure import Refusal, Sample, measure
from benchmarks.ttft.summary import Row, summarise
from benchmarks.vllm_fronts import running_fronts

DEADLINE_S = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("--config", type=Path, help="start P, D and one proxy per mode from this file")
    parser.add_argument("--modes", default="naive,strip,prepare", help="structured_output modes, with --config")
    parser.add_argument(
        "--url", action="append", default=[], metavar="NAME=URL", help="an OpenAI server already running"
    )
    parser.add_argument(
        "--vllm",
        type=Path,
        metavar="CONFIG",
        help="start a stock vLLM pair out of $PD_PEERS and pd-proxy in front of it",
    )
    parser.add_argument("--relay", type=Path, help="with --vllm: a plain relay script to measure beside pd-proxy")
    parser.add_argument("--model", default="smollm2", help="model name in the bodies")
    parser.add_argument(
        "--kinds", default="free,json,regex,choice,grammar", help="also: big, real (schemas of --schemas)"
    )
    parser.add_argument("--schemas", type=Path, help="JSONL with a `schema` member per line")
    parser.add_argument("--words", default="30,300", help="prompt lengths in words")
    parser.add_argument("--rounds", type=int, default=15, help="measurements per cell")
    parser.add_argument("--beside", type=int, default=0, metavar="N", help="keep N long free streams running meanwhile")
    parser.add_argument("--at-most-s", type=float, help="end measuring after this long, and report what there is")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/ttft"), help="folder for ttft.json and ttft.html")


def run(args: argparse.Namespace) -> int:
    """Measure, print, write; 1 when a cell got no answer at all."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends this ends its servers, too
    with ExitStack() as stack:
        targets = dict(pair.split("=", 1) for pair in args.url)
        if args.config:
            targets |= stack.enter_context(_deployment(args.config, args.modes.split(",")))
        if args.vllm:
            peers = os.environ.get("PD_PEERS")
            if not peers:
                print("--vllm needs PD_PEERS, the folder with vLLM's environment", file=sys.stderr)
                return 2
            targets |= stack.enter_context(running_fronts(args.vllm, Path(peers), args.relay))
        if not targets:
            print("nothing to measure: give --config, --vllm or --url NAME=URL", file=sys.stderr)
            return 2
        cells = _cells(list(targets), args)
        results = asyncio.run(_measure_all(cells, targets, args))
        rows = summarise(results)
        _report(rows, args)  # before anything is stopped: that may take long, and be interrupted
    return 0 if len(rows) == len(cells) else 1


@contextmanager
def _deployment(config: Path, modes: list[str]) -> Iterator[dict[str, str]]:
    with running_modes(config, modes) as urls:
        yield urls


def _cells(targets: list[str], args: argparse.Namespace) -> list[Cell]:
    cells = []
    for target in targets:
        for words in (int(number) for number in args.words.split(",")):
            for kind in args.kinds.split(","):
                temperatures = (False,) if kind == "free" else (True, False)
                cells += [Cell(target, kind, words, is_cold) for is_cold in temperatures]
    return cells


async def _measure_all(
    cells: list[Cell], targets: dict[str, str], args: argparse.Namespace
) -> dict[Cell, list[Sample | Refusal]]:
    chance = random.Random(args.seed)
    constraints = Constraints(load_schemas(args.schemas), args.seed)
    results: dict[Cell, list[Sample | Refusal]] = {cell: [] for cell in cells}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as session:
        for cell in cells:  # one unmeasured request each: connections, lazily built kernels, warm constraints
            await measure(session, targets[cell.target], body_of(cell, args.model, constraints, chance))
        started_s = time.perf_counter()
        plan = list(rounds(cells, args.rounds, chance))
        async with streams_beside(session, list(targets.values()), args.beside, args.model, random.Random(args.seed)):
            for cell in track(plan, description="measuring", console=Console(stderr=True)):
                if args.at_most_s is not None and time.perf_counter() - started_s > args.at_most_s:
                    break
                body = body_of(cell, args.model, constraints, chance)
                results[cell].append(await measure(session, targets[cell.target], body))
    return results


def _report(rows: list[Row], args: argparse.Namespace) -> None:
    table = Table(title="TTFT, ms")
    for name in ("target", "words", "cell", "n", "refused", "p50", "p90", "p99", "x free (95 %)"):
        table.add_column(name, justify="left" if name in ("target", "cell") else "right")
    for row in rows:
        ratio = f"{row.to_free.value:.3f} ({row.to_free.low:.2f}-{row.to_free.high:.2f})" if row.to_free else ""
        numbers = [f"{estimate.value:.1f}" for estimate in (row.p50, row.p90, row.p99)]
        counts = [str(row.num_samples), str(row.num_refused)]
        table.add_row(row.cell.target, str(row.cell.prompt_words), row.cell.name, *counts, *numbers, ratio)
    Console(width=140).print(table)
    args.out.mkdir(parents=True, exist_ok=True)
    command = "pd-bench ttft " + shlex.join(sys.argv[2:])
    setting = (
        f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, {platform.machine()}, {platform.system()}, "
        f"{os.getloadavg()[1]:.1f} processes running on average over the last 5 minutes."
    )
    (args.out / "ttft.json").write_text(
        json.dumps({"command": command, "setting": setting, "rows": [row.to_json() for row in rows]}, indent=1)
    )
    (args.out / "ttft.html").write_text(page.render(rows, command, setting))
    print(f"{args.out}/ttft.json, {args.out}/ttft.html")

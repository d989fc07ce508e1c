"""`pd-bench kv`: KV pulls between two processes beside bare NIXL READs of the same bytes, in turns.

A pull is everything D does from `start_pull` to the outcome: wake the driver, check the lease, read scattered blocks,
check the lease again, wake the engine. The READ beside it is one descriptor of one piece. Status 1 when a byte was
wrong or a pull failed. With `--pair NAME P_URL D_URL` running engines are asked instead (`pairs`).
"""

import argparse

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.kv.measure import Bench, Cell, CellResult
from benchmarks.kv.pairs import Pair, measure_pair, print_pairs

TRANSPORTS = {"sm": "sm,self,tcp", "tcp": "tcp,self"}
PAIR_BLOCK = 128
"""vLLM's tokens per block on CPU, a multiple of ours."""

EFFICIENT_FROM_TOKENS, WANTED_EFFICIENCY, WANTED_FIXED_MS = 512, 0.9, 1.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the benchmark."""
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64, 512, 4096], help="prompt lengths")
    parser.add_argument("--concurrent", type=int, nargs="+", default=[1, 8], help="pulls at the same time")
    parser.add_argument(
        "--pool-tokens", type=int, default=4096, help="least size of each side's pool; a small one fits a cache"
    )
    parser.add_argument("--rounds", type=int, default=15, help="rounds per cell")
    parser.add_argument("--transport", choices=list(TRANSPORTS), default="sm", help="UCX transport")
    parser.add_argument("--block-size", type=int, default=16, help="tokens per block")
    parser.add_argument(
        "--run-blocks", type=int, default=1, help="blocks of a prompt that are neighbours; 1: all scattered, the worst"
    )
    parser.add_argument("--idle-s", type=float, default=3.0, help="seconds to watch the idle processes; 0 skips it")
    parser.add_argument(
        "--pair", nargs=3, action="append", metavar=("NAME", "P_URL", "D_URL"), help="ask a running pair instead"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the prompts for --pair")
    parser.add_argument("--json", action="store_true", help="print one JSON line per cell instead of the table")


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    console = Console()
    if args.pair:
        pairs = [Pair(*words) for words in args.pair]
        lengths = sorted({-(-tokens // PAIR_BLOCK) * PAIR_BLOCK + 1 for tokens in args.tokens})
        cells = [(pair, measure_pair(pair, tokens, args.rounds, args.seed)) for tokens in lengths for pair in pairs]
        print_pairs(console, cells)
        return 0
    num_blocks = -(-max(args.pool_tokens, *args.tokens) // args.block_size // args.run_blocks) * args.run_blocks
    bench = Bench(args.block_size, num_blocks, {"UCX_TLS": TRANSPORTS[args.transport]}, args.run_blocks)
    try:
        results = [
            bench.measure(Cell(num_tokens=tokens, num_concurrent=concurrent), args.rounds)
            for concurrent in args.concurrent
            for tokens in args.tokens
        ]
        if args.json:
            for result in results:
                print(msgspec.json.encode(_row(result)).decode())
        else:
            console.print(_table(results, args.transport))
            if args.transport == "sm":
                console.print(f"one guard word: {bench.guard_read_s() * 1e6:.0f} us; every pull reads two")
            else:
                console.print("over tcp a READ needs P's CPU: a pull asks for it, the bare READ waits for P's poll")
            _print_idle(console, bench, args.idle_s)
    finally:
        bench.close()
    return 1 if any(result.num_wrong for result in results) else 0


def _row(result: CellResult) -> dict[str, float]:
    bare_s, pull_s = float(np.median(result.bare_s)), float(np.median(result.pull_s))
    over_s = float(np.median(np.subtract(result.pull_s, result.bare_s)))
    return {
        "tokens": result.cell.num_tokens,
        "concurrent": result.cell.num_concurrent,
        "megabytes": result.num_bytes / 1e6,
        "descriptors": result.num_descriptors,
        "bare_ms": bare_s * 1e3,
        "pull_ms": pull_s * 1e3,
        "pull_p90_ms": float(np.quantile(result.pull_s, 0.9)) * 1e3,
        "pull_gb_per_s": result.num_bytes / pull_s / 1e9,
        "efficiency": bare_s / pull_s,
        "fixed_ms_per_request": over_s * 1e3 / result.cell.num_concurrent,
        "wrong": result.num_wrong,
    }


def _table(results: list[CellResult], transport: str) -> Table:
    title = f"KV pulls beside one bare READ of the same bytes ({transport}, medians)"
    table = Table(
        "concurrent", "tokens", "MB", "bare ms", "pull ms", "p90 ms", "GB/s", "of bare", "over ms", title=title
    )
    for result in results:
        row = _row(result)
        is_large = result.cell.num_tokens >= EFFICIENT_FROM_TOKENS
        meets = row["efficiency"] >= WANTED_EFFICIENCY if is_large else row["fixed_ms_per_request"] <= WANTED_FIXED_MS
        table.add_row(
            f"{row['concurrent']:.0f}",
            f"{row['tokens']:.0f}",
            f"{row['megabytes']:.1f}",
            f"{row['bare_ms']:.3f}",
            f"{row['pull_ms']:.3f}",
            f"{row['pull_p90_ms']:.3f}",
            f"{row['pull_gb_per_s']:.2f}",
            f"{row['efficiency']:.0%}",
            f"{row['fixed_ms_per_request']:.3f}",
            style=None if meets and not result.num_wrong else "yellow",
        )
    table.caption = (
        f"yellow: under {WANTED_EFFICIENCY:.0%} of bare from {EFFICIENT_FROM_TOKENS} tokens on, "
        f"over {WANTED_FIXED_MS} ms below, or wrong bytes; over ms: per request, beyond the bare READ"
    )
    return table


def _print_idle(console: Console, bench: Bench, seconds: float) -> None:
    if seconds <= 0:
        return
    for num_held in (0, 16):
        at_p, at_d = bench.idle_cpu(seconds, num_held)
        console.print(f"idle with {num_held} leases held: P {at_p:.2%} of a core, D {at_d:.2%}")

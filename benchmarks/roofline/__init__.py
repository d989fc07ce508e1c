"""`pd-bench roofline`: bytes and flops of a forward, what this machine reads and multiplies, and how near we come.

Every figure is taken in turns with the floor it is held against, so a busy machine slows both; the table shows the best
of each and the median of their ratios. `--perplexity` adds what each dtype costs in quality on a fixed text.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.roofline.cells import Cell, CellResult, ModelBench
from benchmarks.roofline.machine import Machine
from benchmarks.roofline.quality import Quality, measure_quality
from benchmarks.roofline.steps import KINDS, StepBench, StepFigure
from common.engine.model.cpu_kernels.library import available
from common.engine.model.cpu_kernels.threads import default_num_threads

DTYPES = ("float32", "bfloat16", "int8")
DEFAULT_MODEL = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the benchmark."""
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="a .gguf file or a model folder")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES), help="of weights")
    parser.add_argument("--threads", type=int, default=0, help="of the forward; 0: one per core")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="sequences of a decode step")
    parser.add_argument("--context", type=int, nargs="+", default=[128, 1024], help="tokens each sequence has")
    parser.add_argument("--verify", type=int, nargs="*", default=[2, 4, 6, 8], help="tokens of one sequence at once")
    parser.add_argument("--prefill", type=int, nargs="+", default=[512], help="prompt lengths")
    parser.add_argument("--rounds", type=int, default=15, help="rounds, each measuring everything once")
    parser.add_argument("--busy", action="store_true", help="one thread by its own CPU time: for a machine others use")
    parser.add_argument("--torch", action="store_true", help="measure the plain torch decoder beside ours")
    parser.add_argument("--steps", action="store_true", help="what a step costs outside the model, early and late")
    parser.add_argument("--late", type=int, default=4000, help="output length of a late step (--steps)")
    parser.add_argument("--perplexity", action="store_true", help="quality of each dtype against float32")
    parser.add_argument("--json", action="store_true", help="print one JSON line per cell instead of tables")


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    console = Console(width=None if sys.stdout.isatty() else 130)
    if not available():
        console.print("the CPU kernels cannot be built here (see the log line above); nothing to measure")
        return 1
    if args.busy:
        machine = Machine(1, time.thread_time)
    else:
        machine = Machine(args.threads or default_num_threads(), time.perf_counter)
    if args.steps:
        _print_steps(console, [figure for dtype in args.dtype for figure in _steps(args, dtype, machine)], args.json)
        return 0
    cells = [Cell(num_seqs=batch, length=context) for batch in args.batch for context in args.context]
    cells += [
        Cell(num_seqs=1, length=context, num_new_tokens=tokens, wants_all=True)
        for context in args.context
        for tokens in args.verify
    ]
    cells += [Cell(num_seqs=1, length=tokens, num_new_tokens=tokens) for tokens in args.prefill]
    kernels = ["cpu", "torch"] if args.torch else ["cpu"]
    results = [
        result
        for dtype in args.dtype
        for name in kernels
        for result in ModelBench(args.model, dtype, name, machine).measure(cells, args.rounds)
    ]
    if args.json:
        for result in results:
            print(json.dumps(result.as_row()))
    else:
        console.print(_table(results, machine))
    if args.perplexity:
        _print_quality(console, measure_quality(args.model, args.dtype, machine.num_threads), as_json=args.json)
    return 0


def _steps(args: argparse.Namespace, dtype: str, machine: Machine) -> list[StepFigure]:
    bench = StepBench(args.model, dtype, machine)
    try:
        figures = bench.beside_the_forward([*args.batch, 16], list(KINDS))
        if dtype == args.dtype[0]:  # without a forward there is no dtype
            figures += bench.over_time([1, 8], list(KINDS), [100, args.late])
    finally:
        bench.close()
    return figures


def _print_steps(console: Console, figures: list[StepFigure], as_json: bool) -> None:
    if as_json:
        for figure in figures:
            print(json.dumps(figure.as_row()))
        return
    table = Table(title="A step outside the model; `none`: fixed logits in the forward's place")
    for column in ("forward", "requests", "kind", "output tokens", "forward ms", "outside ms", "share"):
        table.add_column(column, justify="left" if column in ("forward", "kind") else "right")
    for figure in figures:
        share = figure.outside_ms / (figure.outside_ms + figure.forward_ms)
        table.add_row(
            figure.model,
            str(figure.num_seqs),
            figure.kind,
            str(figure.num_output_tokens),
            f"{figure.forward_ms:.2f}",
            f"{figure.outside_ms:.2f}",
            "" if figure.model == "none" else f"{share:.1%}",
        )
    console.print(table)


def _table(results: list[CellResult], machine: Machine) -> Table:
    table = Table(title=f"Forward against this machine's roofline, {machine.num_threads} threads, {machine.name}")
    for column in ("dtype", "by", "forward"):
        table.add_column(column, no_wrap=True)
    for column in ("MB", "GFLOP", "GB/s", "GFLOP/s", "floor ms", "best ms", "median", "x floor"):
        table.add_column(column, justify="right", no_wrap=True)
    for result in results:
        row = result.as_row()
        table.add_row(
            str(row["dtype"]),
            str(row["kernels"]),
            str(row["forward"]),
            *(
                f"{row[key]:.1f}"
                for key in ("read_mb", "gflop", "read_gbs", "gflops", "floor_ms", "best_ms", "median_ms")
            ),
            f"{row['median_ratio']:.2f}",
        )
    return table


def _print_quality(console: Console, qualities: list[Quality], *, as_json: bool) -> None:
    if as_json:
        for quality in qualities:
            print(json.dumps(quality.as_row()))
        return
    table = Table(title="Quality of each dtype on the fixed text")
    for column in ("dtype", "weights MB", "perplexity", "KL to float32 (nats)", "same most likely token", "same bits"):
        table.add_column(column, justify="left" if column == "dtype" else "right")
    for quality in qualities:
        table.add_row(
            quality.dtype,
            f"{quality.weight_bytes / 1e6:.0f}",
            f"{quality.perplexity:.4f}",
            f"{quality.divergence:.2e}",
            f"{quality.agreement:.2%}",
            "yes" if quality.is_identical else "no",
        )
    console.print(table)

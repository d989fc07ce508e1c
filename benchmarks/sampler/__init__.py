"""`pd-bench sampler`: one sampling step, each parameter alone and all together, beside vLLM's Sampler.

Both sample the same logits, read from the same file, with the same histories and the same number of threads; the two
take turns, so that a slow moment of the machine hits both. The peer is found through $PD_PEERS (`vllm/bin/python` in
it) and left out when that is not set.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.sampler.cases import CASES, CLOCKS, Case, Shape, write_logits
from benchmarks.sampler.ours import OurSampler
from benchmarks.sampler.peer import Peer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the benchmark."""
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256], help="requests in the batch")
    parser.add_argument("--vocab", type=int, nargs="+", default=[49152, 128256, 151936], help="vocabulary sizes")
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES), help="parameters to measure")
    parser.add_argument("--logits", choices=["peaked", "flat"], default="peaked", help="shape of the distributions")
    parser.add_argument("--output-tokens", type=int, default=2000, help="tokens each request has already produced")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each sampler per case")
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu: of the process, on a busy machine"
    )
    parser.add_argument("--threads", type=int, default=1, help="torch threads, of both")


def run(args: argparse.Namespace) -> int:
    """Measure and print the table. Status 1 when the peer was faster anywhere."""
    torch.set_num_threads(args.threads)
    peers = os.environ.get("PD_PEERS")
    python = Path(peers) / "vllm/bin/python" if peers else None
    console = Console()
    table = Table("batch", "vocab", "case", "ours ms", "vLLM ms", "ratio", title=f"one step, {args.logits} logits")
    lost = 0
    with tempfile.TemporaryDirectory() as folder, Peer(python, args.threads, args.clock) as peer:
        for vocab_size in args.vocab:
            logits_file = Path(folder) / f"{vocab_size}.npy"
            write_logits(logits_file, max(args.batch), vocab_size, args.logits)
            for batch_size in args.batch:
                shape = Shape(batch_size, vocab_size, args.output_tokens)
                for name in args.case:
                    lost += _measure(table, CASES[name], shape, logits_file, peer, args)
    console.print(table)
    if python is None:
        console.print("no peer: $PD_PEERS is not set")
    elif lost:
        console.print(f"slower than the peer in {lost} of {table.row_count} rows")
    return 1 if lost else 0


def _measure(table: Table, case: Case, shape: Shape, logits_file: Path, peer: Peer, args: argparse.Namespace) -> int:
    """Measure one case and add its row; 1 if the peer was faster."""
    ours_s, theirs_s = [], []
    ours = OurSampler(case, shape, logits_file, CLOCKS[args.clock])
    peer.prepare(case, shape, logits_file)
    for _ in range(args.rounds):
        ours_s.append(ours.step_s())
        if peer.is_there:
            theirs_s.append(peer.step_s())
    best = min(ours_s)
    theirs = f"{min(theirs_s) * 1e3:.3f}" if theirs_s else "-"
    ratio = f"{min(theirs_s) / best:.1f}" if theirs_s else "-"
    table.add_row(str(shape.batch_size), str(shape.vocab_size), case.name, f"{best * 1e3:.3f}", theirs, ratio)
    return int(bool(theirs_s) and min(theirs_s) < best)

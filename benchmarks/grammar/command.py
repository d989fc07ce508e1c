"""The command line and the tables of `pd-bench grammar`."""

import argparse
import asyncio
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.deployment import running_pair
from benchmarks.grammar.enforcement import Allowed, Outcome, measure
from benchmarks.grammar.outputs import ENDLESS, REFUSED, VALID, answer_all
from common.config.engine import GrammarConfig
from common.engine.model.loader import read_checkpoint

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
SMALL_SAMPLE = ROOT / "tests" / "data" / "schemas.jsonl"
TITLE = "%d schemas; instances by label, + allowed, - refused by the masks"
PERCENTILES = (50, 90, 99, 100)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    shared = os.environ.get("PD_SHARED")
    sample = Path(shared) / "data" / "maskbench_sample.jsonl" if shared else SMALL_SAMPLE
    parser.add_argument("--sample", type=Path, default=sample, help="JSON lines of schemas and instances")
    parser.add_argument("--model", type=Path, default=MODEL, help="whose tokenizer (GGUF file or Hugging Face folder)")
    parser.add_argument("--backends", nargs="*", default=["auto", "xgrammar"], help="values of grammar.backend")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="without the first N schemas")
    parser.add_argument("--limit", type=int, default=None, metavar="N", help="N schemas, instead of all that are left")
    parser.add_argument(
        "--compile-timeout",
        type=float,
        default=GrammarConfig().compile_timeout_s,
        metavar="S",
        help="grammar.compile_timeout_s: outlines needs seconds for one schema in four",
    )
    parser.add_argument("--out", type=Path, default=None, help="also write the numbers as JSON")
    parser.add_argument(
        "--outputs", type=Path, default=None, metavar="CONFIG", help="also start P/D and validate its answers"
    )
    parser.add_argument("--served-model", default="smollm2", help="model name in the bodies, with --outputs")


def run(args: argparse.Namespace) -> int:
    """Measure and print; 1 when something invalid was allowed or came out."""
    cases = [json.loads(line) for line in args.sample.read_text().splitlines() if line.strip()]
    cases = cases[args.skip :][: args.limit]
    tokenizer = read_checkpoint(args.model).tokenizer
    configs = [
        msgspec.convert({"backend": backend, "compile_timeout_s": args.compile_timeout}, GrammarConfig)
        for backend in args.backends
    ]
    outcomes = [measure(config, cases, tokenizer) for config in configs]
    if outcomes:
        show(outcomes, len(cases))
    if args.out is not None:
        args.out.write_text(json.dumps([as_json(outcome) for outcome in outcomes], indent=2) + "\n")
    is_bad = any(outcome.wrongly_allowed for outcome in outcomes)
    if args.outputs is not None:
        with running_pair(args.outputs) as (urls, _):
            answers = asyncio.run(answer_all(urls["pair"], args.served_model, cases))
        is_bad |= show_answers(answers, len(cases))
    return int(is_bad)


def show_answers(answers: Mapping[str, Counter[str]], num_schemas: int) -> bool:
    """Print what became of the answers; whether one of them was wrong."""
    console = Console()
    table = Table("answers", "valid", "refused by name", ENDLESS, "wrong", title=f"{num_schemas} schemas")
    wrong: list[str] = []
    for name, counts in answers.items():
        right = [counts[result] for result in (VALID, REFUSED, ENDLESS)]
        table.add_row(name, *map(str, right), str(counts.total() - sum(right)))
        wrong += sorted(counts.keys() - {VALID, REFUSED, ENDLESS})
    console.print(table)
    for line in wrong:
        console.print(line, highlight=False, markup=False)
    return bool(wrong)


def show(outcomes: Sequence[Outcome], num_schemas: int) -> None:
    """Print the tables."""
    console = Console(width=120)
    enforced = Table(
        "backend",
        "served",
        "refused",
        "valid +",
        "other order +",
        "valid -",
        "invalid -",
        "invalid +",
        title=TITLE % num_schemas,
    )
    times = Table("backend", "what", "p50", "p90", "p99", "max", title="times")
    for outcome in outcomes:
        counts = [outcome.instances[True, found] for found in Allowed]
        counts += [outcome.instances[False, Allowed.NOT], outcome.wrongly_allowed]
        enforced.add_row(outcome.backend, str(outcome.served), str(outcome.reasons.total()), *map(str, counts))
        times.add_row(outcome.backend, "ask to first mask, ms", *spread(outcome.first_mask_s, 1e3))
        times.add_row(outcome.backend, "the same, CPU ms (no probe)", *spread(outcome.first_mask_cpu_s, 1e3))
        times.add_row(outcome.backend, "ask to refusal, ms", *spread(outcome.refused_s, 1e3))
        times.add_row(outcome.backend, "one mask, us", *spread(outcome.fill_s, 1e6))
    console.print(enforced)
    console.print(times)
    for outcome in outcomes:
        for reason, count in outcome.reasons.most_common(12):
            console.print(f"{outcome.backend}: {count} x {reason}", highlight=False, markup=False)


def spread(values: Sequence[float], scale: float) -> list[str]:
    """The percentiles as cells."""
    return [f"{value * scale:.3g}" for value in percentiles(values)] or ["-"] * len(PERCENTILES)


def percentiles(values: Sequence[float]) -> list[float]:
    """p50, p90, p99 and the largest; empty for no values."""
    return [float(value) for value in np.percentile(np.asarray(values), PERCENTILES)] if values else []


def as_json(outcome: Outcome) -> dict[str, object]:
    """The numbers of one backend."""
    return {
        "backend": outcome.backend,
        "served": outcome.served,
        "refused": dict(outcome.reasons),
        "instances": {
            f"{'valid' if valid else 'invalid'}, allowed {found.value}": count
            for (valid, found), count in outcome.instances.items()
        },
        "first_mask_ms_p50_p90_p99_max": [value * 1e3 for value in percentiles(outcome.first_mask_s)],
        "first_mask_cpu_ms_p50_p90_p99_max": [value * 1e3 for value in percentiles(outcome.first_mask_cpu_s)],
        "fill_us_p50_p90_p99_max": [value * 1e6 for value in percentiles(outcome.fill_s)],
    }

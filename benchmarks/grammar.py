"""`pd-bench grammar`: time to a grammar's first mask, cold, and what each backend enforces, over real schemas.

Each line of the sample holds `schema` and `tests` (`data`, `valid`). Everything goes through the same service as in an
engine: ask, wait until ready, start a matcher, fill the first mask.
"""

import argparse
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from common.clock import SystemClock
from common.config.engine import GrammarConfig
from common.engine.model.loader import read_checkpoint
from common.engine.structured_output.grammar import GrammarTicket, MaskRow
from common.engine.structured_output.service import LocalGrammarService
from common.engine.tokenizer import Tokenizer
from common.wire.constraint import Constraint, ConstraintKind

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
SMALL_SAMPLE = ROOT / "tests" / "data" / "schemas.jsonl"
TITLE = "%d schemas; instances by label, + accepted, - refused by the masks"
PERCENTILES = (50, 90, 99, 100)


@dataclass
class Outcome:
    """What one backend did with the sample; times in seconds."""

    backend: str
    served: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    instances: Counter[tuple[bool, bool]] = field(default_factory=Counter)
    first_mask_s: list[float] = field(default_factory=list)
    first_mask_cpu_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    fill_s: list[float] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    shared = os.environ.get("PD_SHARED")
    sample = Path(shared) / "data" / "maskbench_sample.jsonl" if shared else SMALL_SAMPLE
    parser.add_argument("--sample", type=Path, default=sample, help="JSON lines of schemas and instances")
    parser.add_argument("--model", type=Path, default=MODEL, help="whose tokenizer (GGUF file or Hugging Face folder)")
    parser.add_argument("--backends", nargs="+", default=["auto", "xgrammar"], help="values of grammar.backend")
    parser.add_argument("--limit", type=int, default=None, help="only the first N schemas")
    parser.add_argument("--out", type=Path, default=None, help="also write the numbers as JSON")


def run(args: argparse.Namespace) -> int:
    """Measure and print; 1 when some backend accepted an invalid instance."""
    cases = [json.loads(line) for line in args.sample.read_text().splitlines() if line.strip()][: args.limit]
    tokenizer = read_checkpoint(args.model).tokenizer
    outcomes = [measure(backend, cases, tokenizer) for backend in args.backends]
    show(outcomes, len(cases))
    if args.out is not None:
        args.out.write_text(json.dumps([as_json(outcome) for outcome in outcomes], indent=2) + "\n")
    return 1 if any(outcome.instances[False, True] for outcome in outcomes) else 0


def measure(backend: str, cases: Sequence[dict[str, Any]], tokenizer: Tokenizer) -> Outcome:
    """Send every schema through a fresh service, one after the other."""
    outcome = Outcome(backend)
    service = LocalGrammarService(
        tokenizer, msgspec.convert({"backend": backend}, GrammarConfig), SystemClock(), warm=backend == "xgrammar"
    )
    try:
        warm_up(service)
        for case in cases:
            measure_one(service, case, tokenizer, outcome)
    finally:
        service.close()
    return outcome


def warm_up(service: LocalGrammarService) -> None:
    """Load what is loaded once per process."""
    service.fill([MaskRow(0, service.start_matcher(settled(service, '{"type":"null"}'), frozenset()))]).wait()


def measure_one(service: LocalGrammarService, case: dict[str, Any], tokenizer: Tokenizer, outcome: Outcome) -> None:
    """One schema: ask to first mask, then every instance token by token."""
    text = json.dumps(case["schema"], separators=(",", ":"))
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    ticket = settled(service, text)
    if ticket.error is not None:
        outcome.refused_s.append(time.perf_counter() - started_s)
        outcome.reasons[reason_class(ticket.error.message)] += 1
        return
    service.fill([MaskRow(0, service.start_matcher(ticket, frozenset()))]).wait()
    outcome.first_mask_s.append(time.perf_counter() - started_s)
    outcome.first_mask_cpu_s.append(time.process_time() - started_cpu_s)
    outcome.served += 1
    for test in case["tests"]:
        accepted = follow(service, ticket, tokenizer, test["data"], outcome)
        outcome.instances[bool(test["valid"]), accepted] += 1


def settled(service: LocalGrammarService, schema: str) -> GrammarTicket:
    """The ticket of `schema`, READY or FAILED."""
    done = threading.Event()
    ticket = service.compile(Constraint(kind=ConstraintKind.JSON_SCHEMA, value=schema))
    ticket.on_settled(done.set)
    done.wait()
    return ticket


def follow(
    service: LocalGrammarService, ticket: GrammarTicket, tokenizer: Tokenizer, data: object, outcome: Outcome
) -> bool:
    """Whether the instance is allowed by the masks, token by token, to its end."""
    matcher = service.start_matcher(ticket, frozenset())
    text = json.dumps(data, ensure_ascii=False)
    for token in tokenizer.encode(text, add_special_tokens=False):
        started_s = time.perf_counter()
        service.fill([MaskRow(0, matcher)]).wait()
        outcome.fill_s.append(time.perf_counter() - started_s)
        if not matcher.accept([token]):
            return False
    return matcher.can_end()


def reason_class(message: str) -> str:
    """A refusal without what is particular to one schema."""
    return message.partition(" (at ")[0].partition(" while processing")[0][:90]


def show(outcomes: Sequence[Outcome], num_schemas: int) -> None:
    """Print the tables."""
    console = Console()
    enforced = Table(
        "backend", "served", "refused", "valid +", "valid -", "invalid -", "invalid +", title=TITLE % num_schemas
    )
    times = Table("backend", "what", "p50", "p90", "p99", "max", title="times")
    for outcome in outcomes:
        counts = [outcome.instances[key] for key in ((True, True), (True, False), (False, False), (False, True))]
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
            f"{'valid' if valid else 'invalid'} {'accepted' if accepted else 'refused'}": count
            for (valid, accepted), count in outcome.instances.items()
        },
        "first_mask_ms_p50_p90_p99_max": [value * 1e3 for value in percentiles(outcome.first_mask_s)],
        "first_mask_cpu_ms_p50_p90_p99_max": [value * 1e3 for value in percentiles(outcome.first_mask_cpu_s)],
        "fill_us_p50_p90_p99_max": [value * 1e6 for value in percentiles(outcome.fill_s)],
    }


def main() -> int:
    """Stand-alone: `python -m benchmarks.grammar`."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())

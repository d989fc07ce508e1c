"""The phases of `pd-bench itl`, interleaved in one run, and their comparison.

    plain     free streams beside as many other free ones
    slow      free streams beside as many whose masks are slow (`maxLength: 100000`)
    hostile   plain, while eight hostile constraints are asked for at once, again and again

Owns: the command line, the order, the report.
"""

import argparse
import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.deployment import running_pair
from benchmarks.itl import hostile
from benchmarks.itl.streams import SLOW_SCHEMA, body_of, gaps_of, never_closed_bias
from benchmarks.ttft.statistics import ratio_of_medians

PHASES = ("plain", "slow", "hostile")


@dataclass
class Findings:
    """What a run saw; gaps in seconds, memory in bytes.

    Attributes:
        gaps_s: by phase, of every round.
        answers: to the hostile constraints.
        memory: by phase, what all processes together grew by in it, of every round.
        idle_cores: cores in use in the second after the last hostile answer, with nothing else to do.
    """

    gaps_s: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    answers: list[hostile.Answer] = field(default_factory=list)
    memory: dict[str, list[int]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    idle_cores: list[float] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("--config", type=Path, default=Path("configs/pd.yaml"), help="start P, D and the proxy from it")
    parser.add_argument("--model", default="smollm2", help="model name in the bodies")
    parser.add_argument("--streams", type=int, default=16, help="free streams, and as many others")
    parser.add_argument("--tokens", type=int, default=192, help="tokens of each stream")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--phases", default=",".join(PHASES), help="which to compare; plain is always there")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    """Measure and print; 1 when a hostile constraint was neither served nor refused with a 4xx."""
    with running_pair(args.config) as (urls, pids):
        findings = asyncio.run(_measure(urls["pair"], pids, args))
    _report(findings, args)
    return int(any(answer.status != 200 and not 400 <= answer.status < 500 for answer in findings.answers))


async def _measure(url: str, pids: Sequence[int], args: argparse.Namespace) -> Findings:
    chance, findings = random.Random(args.seed), Findings()
    phases = [phase for phase in PHASES if phase == "plain" or phase in args.phases.split(",")]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        bias = await never_closed_bias(session, url, args.model)
        free_fields: dict[str, Any] = {"logit_bias": bias}  # the same work for the sampler in every phase
        slow_fields = {**free_fields, "structured_outputs": {"json": SLOW_SCHEMA}}
        for number in range(args.rounds + 1):  # the first one warms up
            for phase in phases if number == 0 else chance.sample(phases, len(phases)):
                free = [body_of(args.model, args.tokens, chance, free_fields) for _ in range(args.streams)]
                fields = slow_fields if phase == "slow" else free_fields
                others = [body_of(args.model, args.tokens, chance, fields) for _ in range(args.streams)]
                before = hostile.memory_bytes(hostile.tree(pids))
                if phase == "hostile":
                    gaps = await _beside_hostile(session, url, pids, findings, (free, others, number, args.model))
                else:
                    gaps = await gaps_of(session, url, free, others)
                if number:
                    findings.gaps_s[phase] += gaps
                    findings.memory[phase].append(hostile.memory_bytes(hostile.tree(pids)) - before)
    return findings


async def _beside_hostile(
    session: aiohttp.ClientSession,
    url: str,
    pids: Sequence[int],
    findings: Findings,
    load: tuple[list[dict[str, Any]], list[dict[str, Any]], int, str],
) -> list[float]:
    free, others, number, model = load
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(hostile.ask_all(session, url, model, number))
        gaps = group.create_task(gaps_of(session, url, free, others))
    findings.answers += asked.result()
    findings.idle_cores.append(await hostile.cpu_share(pids))
    return gaps.result()


def _report(findings: Findings, args: argparse.Namespace) -> None:
    console = Console(width=140)
    table = Table(title=f"ITL of {args.streams} free streams among {2 * args.streams}, ms")
    for name in ("beside", "gaps", "p50", "p90", "p99", "mean", "p50 x plain (95 %)", "mean x plain"):
        table.add_column(name, justify="left" if name == "beside" else "right")
    plain = np.asarray(findings.gaps_s["plain"])
    for phase, gaps in findings.gaps_s.items():
        if not gaps:
            continue
        values = np.asarray(gaps)
        shown = [f"{value * 1e3:.1f}" for value in (*np.percentile(values, (50, 90, 99)), values.mean())]
        ratio = ratio_of_medians(gaps, findings.gaps_s["plain"])
        ratios = [f"{ratio.value:.3f} ({ratio.low:.3f}-{ratio.high:.3f})", f"{values.mean() / plain.mean():.3f}"]
        table.add_row(phase, str(len(gaps)), *shown, *(ratios if phase != "plain" else ("", "")))
    console.print(table)
    if findings.answers:
        _report_hostile(findings, console)


def _report_hostile(findings: Findings, console: Console) -> None:
    table = Table("constraint", "status", "seconds, at most", "reason", title="eight at once")
    for name in hostile.constraints(0):
        answers = [answer for answer in findings.answers if answer.name == name]
        statuses = ", ".join(str(status) for status in sorted({answer.status for answer in answers}))
        table.add_row(
            escape(name), statuses, f"{max(a.seconds for a in answers):.2f}", escape(answers[-1].message[:90])
        )
    console.print(table)
    for phase, grown in findings.memory.items():
        shown = ", ".join(f"{value / 2**20:+.0f}" for value in grown)
        console.print(f"memory of all processes, {phase}, MiB (KV blocks are touched as they are first used): {shown}")
    cores = ", ".join(f"{value:.2f}" for value in findings.idle_cores)
    console.print(f"cores in use in the second after the last answer: {cores}")

"""The measures of `pd-bench engine`, their order, and the table.

Owns: the command line. Servers that are not being measured are paused (SIGSTOP), since some burn cores when idle.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.table import Table

from benchmarks.deployment import running_pair
from benchmarks.engine.client import Stream, ask_many, body_of
from benchmarks.engine.pausing import Target, others_paused


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One figure: `num_clients` at once, prompt and output lengths, and how the figure comes out of the streams."""

    name: str
    unit: str
    num_clients: int
    num_prompt_words: int
    max_tokens: int
    structured: bool
    figure: Callable[[Sequence[Stream]], float]


def _ttft_ms(streams: Sequence[Stream]) -> float:
    return statistics.median(stream.ttft_s for stream in streams) * 1000


def _tpot_ms(streams: Sequence[Stream]) -> float:
    return statistics.median(stream.tpot_s for stream in streams) * 1000


def _tokens_per_s(streams: Sequence[Stream]) -> float:
    return sum(stream.num_tokens for stream in streams) / max(stream.total_s for stream in streams)


def measures(lengths: Sequence[int], max_tokens: int) -> list[Measure]:
    """TTFT per prompt length, TPOT at batch 1 and 8, tokens/s at 16; each free and structured."""
    found = []
    for structured in (False, True):
        kind = "structured" if structured else "free"
        for length in lengths:
            words = max(1, round(length / 1.35))
            found.append(_measure(f"TTFT {length} tokens, {kind}", "ms", 1, words, 2, structured, _ttft_ms))
        for batch in (1, 8):
            name = f"TPOT batch {batch}, {kind}"
            found.append(_measure(name, "ms", batch, 24, max_tokens, structured, _tpot_ms))
        found.append(_measure(f"tokens/s at 16, {kind}", "1/s", 16, 24, max_tokens, structured, _tokens_per_s))
    return found


def _measure(  # noqa: PLR0913 - one row of the table above, in its column order
    name: str,
    unit: str,
    clients: int,
    words: int,
    max_tokens: int,
    structured: bool,
    figure: Callable[[Sequence[Stream]], float],
) -> Measure:
    return Measure(
        name=name,
        unit=unit,
        num_clients=clients,
        num_prompt_words=words,
        max_tokens=max_tokens,
        structured=structured,
        figure=figure,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("--config", type=Path, help="start our pair; measured as `single` (D alone) and `pair` (proxy)")
    parser.add_argument("--dtype", nargs="+", default=[], help="start one such pair for each of these engine dtypes")
    parser.add_argument(
        "--url", action="append", default=[], metavar="NAME=URL", help="an OpenAI server already running"
    )
    parser.add_argument(
        "--pids",
        action="append",
        default=[],
        metavar="NAME=PID,PID",
        help="pause these and their children while others run",
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--lengths", default="32,512,2048", help="prompt lengths in tokens (approximate)")
    parser.add_argument("--max-tokens", type=int, default=32, help="output length for TPOT and throughput")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--at-most-s", type=float, default=3600.0, help="begin no further figure after this long")
    parser.add_argument("--only", default="", help="only measures whose name contains this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/engine.json"))


def run(args: argparse.Namespace) -> int:
    """Measure every target in every round, print medians and ratios to the first target."""
    with ExitStack() as stack:
        pids = {name: tuple(map(int, ids.split(","))) for name, ids in (pair.split("=", 1) for pair in args.pids)}
        others = [Target(name, url, pids.get(name, ())) for name, url in (pair.split("=", 1) for pair in args.url)]
        with others_paused(None, others):  # or a pair of ours would not come up beside those that burn the cores
            ours = _start_ours(stack, args)
        targets = [*ours, *others]
        if not targets:
            print("nothing to measure: give --config or --url NAME=URL", file=sys.stderr)
            return 2
        chosen = [
            m for m in measures([int(n) for n in args.lengths.split(",")], args.max_tokens) if args.only in m.name
        ]
        results = asyncio.run(_measure_all(targets, chosen, args))
        _report(
            targets, chosen, results, args.out
        )  # before anything is stopped: that may take long, and be interrupted
        with others_paused(None, others):
            stack.close()
    return 0


def _start_ours(stack: ExitStack, args: argparse.Namespace) -> list[Target]:
    """One pair per dtype, stopped with `stack`; none without a config."""
    targets = []
    for dtype in (args.dtype or [None]) if args.config else []:
        # Without guesses: greedy text after random words soon repeats itself, and would be guessed too well.
        keys = {"speculative_config": {"method": "none"}} | ({"dtype": dtype} if dtype else {})
        urls, pids = stack.enter_context(running_pair(args.config, keys))
        targets += [Target(f"{name} {dtype}" if dtype else name, url, pids) for name, url in urls.items()]
    return targets


async def _measure_all(
    targets: Sequence[Target], chosen: Sequence[Measure], args: argparse.Namespace
) -> dict[tuple[str, str], list[float]]:
    chance = random.Random(args.seed)
    results: dict[tuple[str, str], list[float]] = {}
    give_up_at_s = time.monotonic() + args.at_most_s
    # A server that was paused may close an idle connection just when it is used again: each request opens its own.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300)) as session:
        for number in range(args.rounds):
            for measure in chosen:
                for target in chance.sample(list(targets), len(targets)):
                    if time.monotonic() > give_up_at_s:
                        return results
                    with others_paused(target, targets):
                        if number == 0:
                            await _one(
                                session, target, replace(measure, num_clients=1, max_tokens=4), args.model, chance
                            )
                        figure = await _one(session, target, measure, args.model, chance)
                    results.setdefault((measure.name, target.name), []).append(figure)
    return results


async def _one(
    session: aiohttp.ClientSession, target: Target, measure: Measure, model: str, chance: random.Random
) -> float:
    bodies = [
        body_of(model, measure.num_prompt_words, measure.max_tokens, measure.structured, chance)
        for _ in range(measure.num_clients)
    ]
    return measure.figure(await ask_many(session, target.url, bodies))


def _report(
    targets: Sequence[Target], chosen: Sequence[Measure], results: dict[tuple[str, str], list[float]], out: Path
) -> None:
    table = Table(title="medians; in brackets: over the first target")
    table.add_column("measure")
    for target in targets:
        table.add_column(target.name, justify="right")
    for measure in chosen:
        found = [results.get((measure.name, target.name)) for target in targets]
        if found[0] is None:  # the time was over before
            continue
        first = statistics.median(found[0])
        medians = [None if values is None else statistics.median(values) for values in found]
        cells = ["-" if median is None else f"{median:.1f} ({median / first:.2f})" for median in medians[1:]]
        table.add_row(measure.name, f"{first:.1f} {measure.unit}", *cells)
    Console(width=140).print(table)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(
        json.dumps([{"measure": name, "target": target, "values": v} for (name, target), v in results.items()])
    )

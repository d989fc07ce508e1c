"""The two deployments, the interleaved rounds, the table.

Owns: the command line and the comparison. Every answer of the two must have the same length, or the run fails: guesses
change how fast a text comes, never the text.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from benchmarks import scrape
from benchmarks.deployment import running_pair
from benchmarks.speculation.texts import TEXTS
from benchmarks.ttft.statistics import ratio_of_medians

WAYS = ("plain", "guessing")
_DRAFTS = "pd_draft_tokens_total"


@dataclass
class Findings:
    """Of one kind of text: seconds per output token by way, tokens said, and guesses by what became of them."""

    tpot_s: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    num_tokens: int = 0
    guesses: dict[str, float] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("--config", type=Path, default=Path("configs/pd.yaml"), help="start the engines from it")
    parser.add_argument("--dtype", default=None, help="override the file's")
    parser.add_argument("--method", default="grammar+ngram", help="who guesses")
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--model", default="smollm2", help="model name in the bodies")
    parser.add_argument("--max-tokens", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=7)


def run(args: argparse.Namespace) -> int:
    """Measure and print; 1 when the two ways did not say the same."""
    keys: dict[str, Any] = {} if args.dtype is None else {"dtype": args.dtype}
    guessing = {"method": args.method, "num_speculative_tokens": args.num_speculative_tokens}
    with (
        running_pair(args.config, {**keys, "speculative_config": {"method": "none"}}) as (plain, _),
        running_pair(args.config, {**keys, "speculative_config": guessing}) as (guesser, _),
    ):
        urls = {"plain": plain["single"], "guessing": guesser["single"]}
        findings = asyncio.run(_measure(urls, args))
    _report(findings)
    return 0


async def _measure(urls: Mapping[str, str], args: argparse.Namespace) -> dict[str, Findings]:
    findings = {}
    async with aiohttp.ClientSession() as session:
        for name, text in TEXTS.items():
            found = findings[name] = Findings()
            body = {"model": args.model, "max_tokens": args.max_tokens, **text}
            await _ask(session, urls["plain"], {**body, "seed": -7})
            await _ask(session, urls["guessing"], {**body, "seed": -7})
            before = await _guesses(urls["guessing"])
            for seed in range(args.rounds):
                lengths = set()
                for way in WAYS if seed % 2 else reversed(WAYS):
                    tpot_s, num_tokens = await _ask(session, urls[way], {**body, "seed": seed})
                    found.tpot_s[way].append(tpot_s)
                    lengths.add(num_tokens)
                if len(lengths) > 1:
                    raise SystemExit(f"{name}, seed {seed}: the two ways said texts of {sorted(lengths)} tokens")
                found.num_tokens += max(lengths)
            after = await _guesses(urls["guessing"])
            found.guesses = {result: number - before.get(result, 0) for result, number in after.items()}
    return findings


async def _ask(session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> tuple[float, int]:
    """Seconds per token between the first piece of text and the last, and how many tokens the server counted."""
    arrived, num_tokens = [], 0
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with session.post(f"{url}/v1/chat/completions", json=asked) as response:
        if response.status != 200:
            raise SystemExit(f"{url} answered {response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            delta = event["choices"][0]["delta"] if event["choices"] else {}
            if delta.get("content") or delta.get("tool_calls"):
                arrived.append(time.perf_counter())
            if event.get("usage"):
                num_tokens = event["usage"]["completion_tokens"]
    return (arrived[-1] - arrived[0]) / max(num_tokens - 1, 1), num_tokens


async def _guesses(url: str) -> dict[str, float]:
    return await asyncio.to_thread(scrape.by_label, url, _DRAFTS, "result")


def _report(findings: Mapping[str, Findings]) -> None:
    table = Table(title="time per output token, one request at a time")
    for column in ("text", "plain, ms", "guessing, ms", "ratio (95 %)", "tokens", "guesses right", "wrong"):
        table.add_column(column, justify="left" if column == "text" else "right")
    for name, found in findings.items():
        medians = [f"{1e3 * statistics.median(found.tpot_s[way]):.2f}" for way in WAYS]
        ratio = ratio_of_medians(found.tpot_s["guessing"], found.tpot_s["plain"])
        interval = f"{ratio.value:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"
        guesses = [f"{found.guesses.get(result, 0):.0f}" for result in ("accepted", "rejected")]
        table.add_row(name, *medians, interval, str(found.num_tokens), *guesses)
    Console(width=120).print(table)

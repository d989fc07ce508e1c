"""What moving a prompt's KV costs a request, seen from outside: the same questions to any P/D pair of this wire format.

    1  P prefills a new prompt and says where its KV lies   prefill
    2  D answers one token from P's KV                      pulled
    3  D answers the same from its own prefix cache         cached

`pulled - cached` is all that the transfer adds: the reference's way into D, the lease, the read, what wakes the engine.
Beside it, what D's own metrics say about the read. Prompts are a whole number of blocks and one token, so that step 3
computes exactly what step 2 does.
Owns: the questions and the numbers. Does not know: whose engines they are.
"""

import json
import random
import time
import urllib.request
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import scrape

ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
READ_SECONDS = ("pd_kv_pull_seconds_sum", "vllm:nixl_xfer_time_seconds_sum")
READ_BYTES = ("pd_kv_pull_bytes_total", "vllm:nixl_bytes_transferred_sum")
METRICS_WITHIN_S = 2.0
NUM_WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Pair:
    """Base URLs of P and D."""

    name: str
    prefill: str
    decode: str


@dataclass
class PairCell:
    """Seconds of each round at one prompt length; `read_s` and `read_bytes` as D itself counts them."""

    num_tokens: int
    prefill_s: list[float] = field(default_factory=list)
    pulled_s: list[float] = field(default_factory=list)
    cached_s: list[float] = field(default_factory=list)
    read_s: list[float] = field(default_factory=list)
    read_bytes: list[float] = field(default_factory=list)


def measure_pair(pair: Pair, num_tokens: int, num_rounds: int, seed: int) -> PairCell:
    """One cell; the first rounds (connections, caches) do not count."""
    chance, cell = random.Random(f"{seed} {num_tokens}"), PairCell(num_tokens)
    model = _get(f"{pair.decode}/v1/models")["data"][0]["id"]
    for number in range(NUM_WARM_UP + num_rounds):
        prompt = chance.choices(range(1000, 40000), k=num_tokens)
        body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        prefilled, prefill_s = _post(pair.prefill, {**body, "kv_transfer_params": ASK})
        params = prefilled["kv_transfer_params"]
        before = _counts(pair.decode)
        pulled, pulled_s = _post(pair.decode, {**body, "kv_transfer_params": params})
        cached, cached_s = _post(pair.decode, body)
        if pulled["choices"][0]["text"] != cached["choices"][0]["text"]:
            raise SystemExit(f"{pair.name}: the answer from P's KV is not the one from D's own")
        if number >= NUM_WARM_UP:
            seconds, num_bytes = _read_since(pair.decode, before)
            cell.prefill_s.append(prefill_s)
            cell.pulled_s.append(pulled_s)
            cell.cached_s.append(cached_s)
            cell.read_s.append(seconds)
            cell.read_bytes.append(num_bytes)
    return cell


def print_pairs(console: Console, cells: list[tuple[Pair, PairCell]]) -> None:
    """One row per pair and length, medians."""
    columns = (
        "pair",
        "tokens",
        "MB",
        "prefill ms",
        "pulled ms",
        "cached ms",
        "transfer adds ms",
        "p90 ms",
        "D's own read ms",
        "GB/s",
    )
    table = Table(*columns, title="What a transfer adds to a request, from outside (medians)")
    for pair, cell in cells:
        adds_ms = np.subtract(cell.pulled_s, cell.cached_s) * 1e3
        read_s, num_bytes = float(np.median(cell.read_s)), float(np.median(cell.read_bytes))
        table.add_row(
            pair.name,
            str(cell.num_tokens),
            f"{num_bytes / 1e6:.1f}",
            f"{np.median(cell.prefill_s) * 1e3:.0f}",
            f"{np.median(cell.pulled_s) * 1e3:.1f}",
            f"{np.median(cell.cached_s) * 1e3:.1f}",
            f"{np.median(adds_ms):.1f}",
            f"{np.quantile(adds_ms, 0.9):.1f}",
            f"{read_s * 1e3:.2f}",
            f"{num_bytes / read_s / 1e9:.2f}" if read_s > 0 else "-",
        )
    console.print(table)


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as response:
        return json.load(response)


def _post(base: str, body: dict[str, Any]) -> tuple[Any, float]:
    request = urllib.request.Request(
        f"{base}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    begin = time.perf_counter()
    with urllib.request.urlopen(request, timeout=300) as response:
        answer = json.load(response)
    return answer, time.perf_counter() - begin


def _counts(base: str) -> tuple[float, float]:
    """Seconds of reads and bytes read since D's start, summed over labels; 0 where D does not say."""
    seconds, num_bytes = scrape.totals(base, READ_SECONDS, READ_BYTES)
    return seconds, num_bytes


def _read_since(base: str, before: tuple[float, float]) -> tuple[float, float]:
    """What the last read added; D may count it a little later than it answers."""
    give_up_at = time.monotonic() + METRICS_WITHIN_S
    while True:
        now = _counts(base)
        if now[1] > before[1] or time.monotonic() > give_up_at:
            return now[0] - before[0], now[1] - before[1]
        time.sleep(0.05)

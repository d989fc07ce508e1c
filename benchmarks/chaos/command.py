"""The run: fault-free answers first, then faults under load, then quiet, then the books.

Owns: the command line, the order of faults (a function of the seed), the verdict.
"""

import argparse
import asyncio
import random
import signal
import time
from pathlib import Path

import aiohttp
import yaml

from benchmarks.chaos.clients import Verdict, ask, one_client, requests
from benchmarks.chaos.fleet import Fleet, running_fleet

HELD = {
    "prefill": ("pd_kv_blocks_in_use", "pd_leases_held", "pd_requests_running", "pd_requests_waiting"),
    "decode": ("pd_kv_blocks_in_use", "pd_requests_running", "pd_requests_waiting"),
    "proxy": ("pd_proxy_slots_in_use", "pd_requests_running"),
}
QUIET_WITHIN_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("--config", type=Path, default=Path("configs/pd.yaml"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--engine",
        nargs="*",
        default=["num_threads=1", "dtype=int8"],
        metavar="KEY=VALUE",
        help="over the config's own",
    )


def run(args: argparse.Namespace) -> int:
    """0 when every answer was right or a clean error and nothing is held at the end."""
    keys = {name: yaml.safe_load(value) for name, _, value in (pair.partition("=") for pair in args.engine)}
    with running_fleet(args.config, keys, args.prefill, args.decode) as fleet:
        verdict = asyncio.run(_run(fleet, args))
        held = _held_after_quiet(fleet)
    print(f"seed {args.seed}, {args.minutes:g} minutes: {dict(verdict.outcomes)}")
    for text, number in verdict.errors.most_common():
        print(f"  {number} x {text}")
    for line in verdict.wrong[:20]:
        print(f"  WRONG {line}")
    for name, value in held.items():
        print(f"  STILL HELD {name} = {value:g}")
    is_right = not verdict.wrong and not held and verdict.outcomes["right"] > 0
    print(
        "verdict: every answered request equals the fault-free run; nothing leaked" if is_right else "verdict: FAILED"
    )
    return 0 if is_right else 1


async def _run(fleet: Fleet, args: argparse.Namespace) -> Verdict:
    bodies = requests(args.model, 24, args.seed)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        wanted = [await ask(session, fleet.url("proxy"), body) for body in bodies]
    broken = [text for text in wanted if text.startswith("error: ")]
    if broken:
        raise SystemExit(f"the fault-free run already fails: {broken[0]}")
    verdict, ends = Verdict(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for number in range(args.clients):
            seed = args.seed * 1000 + number
            group.create_task(one_client(fleet.url("proxy"), bodies, wanted, verdict, ends, seed))
        await _faults(fleet, args)
        ends.set()
    return verdict


async def _faults(fleet: Fleet, args: argparse.Namespace) -> None:
    chance = random.Random(args.seed)
    ends_at = time.monotonic() + args.minutes * 60
    while time.monotonic() < ends_at:
        await asyncio.sleep(chance.uniform(1.0, 6.0))
        name, kind = chance.choice(fleet.engines), chance.choice(("kill", "freeze", "restart"))
        print(f"{time.strftime('%H:%M:%S')} {kind} {name}", flush=True)
        if kind == "freeze":
            fleet.signal(name, signal.SIGSTOP)
            await asyncio.sleep(chance.uniform(0.2, 8.0))
            fleet.signal(name, signal.SIGCONT)
            continue
        fleet.signal(name, signal.SIGKILL if kind == "kill" else signal.SIGTERM)
        if kind == "restart":
            await asyncio.to_thread(fleet.processes.pop(name).wait)
        await asyncio.sleep(chance.uniform(0.0, 4.0))
        fleet.start(name)
        await asyncio.to_thread(fleet.wait_ready, name)


def _held_after_quiet(fleet: Fleet) -> dict[str, float]:
    """What is still held once everything had time to let go."""
    give_up_at = time.monotonic() + QUIET_WITHIN_S
    while True:
        held = {
            f"{name} {metric}": value
            for name in fleet.ports
            for metric in HELD[name.rstrip("0123456789")]
            if (value := fleet.total(name, metric)) > 0
        }
        if not held or time.monotonic() > give_up_at:
            return held
        time.sleep(0.5)

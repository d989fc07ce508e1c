"""`make demo`: start the three, ask one free and one JSON-schema question, show where the time to first token went.

Owns: the questions and how the answers are shown. Does not know: how the processes are started (`proxy.up.trio`).
"""

import argparse
import asyncio
import json
from collections.abc import Sequence
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from common.clock import SystemClock
from common.errors import ConfigError, PDError, UpstreamBroken
from proxy.up.plan import plan_children
from proxy.up.trio import Trio, running_trio

ANSWER_WITHIN_S = 120.0

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"type": "string", "maxLength": 20},
        "is_coastal": {"type": "boolean"},
    },
    "required": ["city", "country", "is_coastal"],
    "additionalProperties": False,
}

QUESTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("free text", {"messages": [{"role": "user", "content": "Why is the sea salty? Answer in one sentence."}]}),
    (
        "JSON schema",
        {
            "messages": [{"role": "user", "content": "Describe the city of Lisbon as JSON."}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "city", "schema": SCHEMA, "strict": True},
            },
        },
    ),
)

MEANINGS = {
    "front": "proxy: reading the request, choosing P and D",
    "queue_p": "P: waiting for a place in a step",
    "grammar_p": "P: grammar work (none: the constraint was stripped)",
    "prefill": "P: computing the prompt",
    "handoff": "P: holding the KV under a lease, answering",
    "grammar_d": "D: grammar work left after the prefill",
    "queue_d": "D: waiting for blocks",
    "pull": "D: reading P's KV over NIXL",
    "first": "D: last prompt token, first token under the mask",
    "return": "back through the proxy to the client",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0 when both questions were answered."""
    parser = argparse.ArgumentParser(prog="demo", description="P, D and the proxy, two questions, and where TTFT went.")
    parser.add_argument("--config", required=True, help="YAML file with the sections engine, prefill, decode, proxy")
    options = parser.parse_args(argv)
    console = Console(highlight=False)
    try:
        asyncio.run(_demo(options.config, console))
    except PDError as error:
        console.print(f"[red]demo:[/red] {error}")
        return 2 if isinstance(error, ConfigError) else 1
    return 0


async def _demo(config: str, console: Console) -> None:
    def report(line: str) -> None:
        """Show what the processes are up to."""
        console.print(line, style="dim", markup=False, soft_wrap=True)

    async with running_trio(plan_children(config), report, SystemClock()) as trio:
        model = await _served_model(trio)
        timeout = aiohttp.ClientTimeout(total=ANSWER_WITHIN_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await _warm_up(session, trio, model)
            for title, question in QUESTIONS:
                body = {
                    "model": model,
                    "max_tokens": 80,
                    "temperature": 0,
                    "stream": True,
                    "timeline": True,
                    **question,
                }
                console.rule(title)
                timeline = await _stream(session, trio.url("proxy"), body, console)
                console.print(_table(timeline))


async def _served_model(trio: Trio) -> str:
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session,
        session.get(trio.url("proxy") + "/v1/models") as response,
    ):
        models = await response.json()
    name: str = models["data"][0]["id"]
    return name


async def _warm_up(session: aiohttp.ClientSession, trio: Trio, model: str) -> None:
    """One small request: the first one of a process also shakes hands and touches every page of the weights."""
    body = {"model": model, "prompt": "Hello", "max_tokens": 2}
    async with session.post(trio.url("proxy") + "/v1/completions", json=body) as response:
        await response.read()


async def _stream(session: aiohttp.ClientSession, url: str, body: dict[str, Any], console: Console) -> dict[str, Any]:
    """Print the answer as it arrives; the timeline of its last chunk.

    Raises:
        UpstreamBroken: the answer is an error or carries no timeline.
    """
    timeline: dict[str, Any] | None = None
    async with session.post(url + "/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise UpstreamBroken(f"the proxy answered {response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[len(b"data: ") :])
            timeline = chunk.get("timeline", timeline)
            for choice in chunk.get("choices", ()):
                console.print(choice["delta"].get("content") or "", end="", markup=False, soft_wrap=True)
    console.print()
    if timeline is None:
        raise UpstreamBroken("the answer ended without a timeline")
    return timeline


def _table(timeline: dict[str, Any]) -> Table:
    stages: dict[str, float] = timeline["stages_ms"]
    table = Table(title="time to first token", title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("stage")
    table.add_column("ms", justify="right")
    table.add_column("what happened", style="dim")
    for name, meaning in MEANINGS.items():
        if name in stages:
            table.add_row(name, f"{stages[name]:.1f}", meaning)
    table.add_section()
    table.add_row("TTFT", f"{sum(stages.values()):.1f}", "the sum of the above")
    return table


if __name__ == "__main__":
    raise SystemExit(main())

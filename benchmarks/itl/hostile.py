"""Constraints made to hurt: long compilations, large texts, nonsense; what each is answered, and what stays behind.

Owns: the constraints, their answers, the engine's memory and CPU afterwards. Does not know: the streams beside them.
"""

import asyncio
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

MEASURED_S = 1.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What one constraint was answered, and after how long."""

    name: str
    status: int
    seconds: float
    message: str


def constraints(number: int) -> dict[str, dict[str, Any]]:
    """Eight of them by name; those that compile for long differ by `number`, so that no cache answers."""
    deep: dict[str, Any] = {"type": "string"}
    for level in range(18):
        deep = {"oneOf": [{"type": "string", "minLength": level}, {"type": "array", "items": deep}, {"minLength": 2}]}
    return {
        "400 rules that begin alike (1)": {"grammar": _slow_grammar(2 * number)},
        "400 rules that begin alike (2)": {"grammar": _slow_grammar(2 * number + 1)},
        "([ab]{1,400}){1,400}": {"regex": f"([ab]{{1,400}}){{1,400}}{number}"},
        "overlapping oneOf, 18 deep": {"json": deep},
        "two roots": {"grammar": 'root ::= "a"\nroot ::= "b"'},
        "$ref to itself": {"json": {"$ref": "#"}},
        "5 MB": {"json": {"enum": ["x" * 5_000_000]}},
        "NUL": {"regex": "a\x00b"},
    }


def _slow_grammar(number: int) -> str:
    rules = [f"root ::= {' | '.join(f'a{rule}' for rule in range(400))}"]
    for rule in range(400):
        first, second = (rule * 7 + 1) % 400, (rule * 3 + 2) % 400
        rules.append(f'a{rule} ::= [a-z]{{1,{rule + 5}}} a{first} | "{number}q{rule}" a{second} | ""')
    return "\n".join(rules)


async def ask_all(session: aiohttp.ClientSession, url: str, model: str, number: int) -> list[Answer]:
    """All at once."""
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_ask(session, url, name, {"model": model, "structured_outputs": outputs}))
            for name, outputs in constraints(number).items()
        ]
    return [task.result() for task in tasks]


async def _ask(session: aiohttp.ClientSession, url: str, name: str, body: dict[str, Any]) -> Answer:
    sent_s = time.perf_counter()
    async with session.post(f"{url}/v1/completions", json={**body, "prompt": "x", "max_tokens": 4}) as response:
        text = await response.text()
    seconds = time.perf_counter() - sent_s
    try:
        message = str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = text
    return Answer(name, response.status, seconds, message)


def tree(pids: Sequence[int]) -> list[int]:
    """The processes and all below them that live now."""
    found = list(pids)
    for pid in found:
        with suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def memory_bytes(pids: Sequence[int]) -> int:
    """Resident memory of those that live."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return total


async def cpu_share(pids: Sequence[int]) -> float:
    """Cores in use by the processes and their children over the next second."""
    before = {pid: _cpu_s(pid) for pid in tree(pids)}
    await asyncio.sleep(MEASURED_S)
    return sum(_cpu_s(pid) - before.get(pid, 0.0) for pid in tree(pids)) / MEASURED_S


def _cpu_s(pid: int) -> float:
    """Processor time so far; 0 for a process that is gone."""
    with suppress(OSError):
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0

"""What is measured: cells of (target, constraint kind, prompt length, cold or warm) and the bodies they send.

Owns: the plan. Does not know: HTTP, statistics.
"""

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.prompts import random_words


@dataclass(frozen=True, slots=True)
class Cell:
    """One thing to measure again and again.

    Attributes:
        target: name of the URL under test (for our own deployments: the mode).
        kind: `free` or a constraint kind.
        prompt_words: length of the user message in words (about 1.3 tokens each for the default model).
        is_cold: whether each request brings a constraint that nobody has seen.
    """

    target: str
    kind: str
    prompt_words: int
    is_cold: bool

    @property
    def name(self) -> str:
        """Label in tables."""
        return self.kind if self.kind == "free" else f"{self.kind}, {'cold' if self.is_cold else 'warm'}"


class Constraints:
    """Constraints of each kind; `fresh` ones differ from all before by a name that the compiler must read."""

    def __init__(self, schemas: Sequence[dict[str, Any]], seed: int) -> None:
        self._chance = random.Random(seed)
        self._schemas = list(schemas)
        self._big = big_schema()
        self._numbers = itertools.count()

    def make(self, kind: str, is_fresh: bool) -> dict[str, Any]:
        """Body fields that ask for a constraint of `kind`; empty for `free`."""
        number = f"{next(self._numbers)}_{self._chance.getrandbits(40)}" if is_fresh else "warm"
        if kind == "free":
            return {}
        if kind == "json":
            return _json_schema(SMALL_SCHEMA, number)
        if kind == "big":
            return _json_schema(self._big, number)
        if kind == "real":
            schema = self._chance.choice(self._schemas) if is_fresh else self._schemas[0]
            return _json_schema(schema, number)
        if kind == "regex":
            return {"structured_outputs": {"regex": f"(id{number}|[A-Z]{{3}}-[0-9]{{4}})"}}
        if kind == "choice":
            return {"structured_outputs": {"choice": ["yes", "no", f"answer {number}"]}}
        if kind == "grammar":
            return {"structured_outputs": {"grammar": f'root ::= "a{number}" | pair\npair ::= [a-z]+ "=" [0-9]+\n'}}
        raise ValueError(f"no such constraint kind: {kind}")


def _json_schema(schema: dict[str, Any], number: str) -> dict[str, Any]:
    fresh = {**schema, "title": f"answer {number}"}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": fresh}}}


def big_schema() -> dict[str, Any]:
    """About 14 KB: 12 sections, each with texts, numbers in ranges, enums, and a list of objects."""
    entry = {
        "label": {"type": "string", "maxLength": 40},
        "amount": {"type": "number"},
        "state": {"enum": ["open", "closed", "waiting", "unknown"]},
        "notes": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
    }
    sections = {}
    for number in range(12):
        fields: dict[str, Any] = {f"text_{number}_{i}": {"type": "string", "maxLength": 80} for i in range(4)}
        fields |= {f"count_{number}_{i}": {"type": "integer", "minimum": 0, "maximum": 100 * i} for i in range(1, 4)}
        fields |= {f"choice_{number}": {"enum": [f"value_{number}_{i}" for i in range(12)]}}
        fields |= {f"entries_{number}": {"type": "array", "items": _closed_object(entry)}}
        sections[f"section_{number}"] = _closed_object(fields)
    return _closed_object(sections)


def _closed_object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


SMALL_SCHEMA = _closed_object(
    {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    }
)


def load_schemas(path: Path | None) -> list[dict[str, Any]]:
    """Schemas of a JSONL file with a `schema` member per line; a small object schema when there is none."""
    if path is None:
        return [SMALL_SCHEMA]
    return [json.loads(line)["schema"] for line in path.read_text().splitlines() if line.strip()]


def body_of(cell: Cell, model: str, constraints: Constraints, chance: random.Random) -> dict[str, Any]:
    """A streamed chat request; its prompt is new each time, so no prefix cache answers for the prefill."""
    words = random_words(cell.prompt_words, chance)
    return {
        "model": model,
        "messages": [{"role": "user", "content": f"{chance.getrandbits(40)} {words}"}],
        "max_tokens": 2,
        "temperature": 0,
        "stream": True,
        **constraints.make(cell.kind, cell.is_cold),
    }


def rounds(cells: Sequence[Cell], num_rounds: int, chance: random.Random) -> Iterator[Cell]:
    """Every cell once per round, in a new order each round: drift of the machine falls on all alike."""
    for _ in range(num_rounds):
        order = list(cells)
        chance.shuffle(order)
        yield from order

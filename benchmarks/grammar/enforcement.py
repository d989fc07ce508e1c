"""What a backend does with real schemas: served or refused, time to the first mask, which instances the masks allow.

Owns: one backend's run over the sample. Everything goes through the same service as in an engine: ask, wait until
ready, start a matcher, fill the first mask. Does not know: the command line, the tables.
"""

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from benchmarks.grammar.key_order import in_schema_order
from common.clock import SystemClock
from common.config.engine import GrammarConfig
from common.engine.structured_output.grammar import GrammarTicket, MaskRow
from common.engine.structured_output.service import LocalGrammarService
from common.engine.tokenizer import Tokenizer
from common.wire.constraint import Constraint, ConstraintKind


class Allowed(Enum):
    """What the masks make of an instance. Properties are generated in the order of the schema."""

    AS_WRITTEN = "as written"
    REORDERED = "with its keys in the schema's order"
    NOT = "not"


@dataclass
class Outcome:
    """What one backend did with the sample; times in seconds."""

    backend: str
    served: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    instances: Counter[tuple[bool, Allowed]] = field(default_factory=Counter)
    first_mask_s: list[float] = field(default_factory=list)
    first_mask_cpu_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    fill_s: list[float] = field(default_factory=list)

    @property
    def wrongly_allowed(self) -> int:
        """Invalid instances that the masks allow in some order of their keys."""
        return self.instances[False, Allowed.AS_WRITTEN] + self.instances[False, Allowed.REORDERED]


def measure(config: GrammarConfig, cases: Sequence[dict[str, Any]], tokenizer: Tokenizer) -> Outcome:
    """Send every schema through a fresh service, one after the other; none takes longer than `compile_timeout_s`."""
    outcome = Outcome(config.backend)
    service = LocalGrammarService(tokenizer, config, SystemClock(), warm=config.backend == "xgrammar")
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
        found = Allowed.NOT
        if follow(service, ticket, tokenizer, test["data"], outcome):
            found = Allowed.AS_WRITTEN
        elif follow(service, ticket, tokenizer, in_schema_order(test["data"], case["schema"]), outcome):
            found = Allowed.REORDERED
        outcome.instances[bool(test["valid"]), found] += 1


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
    message = re.sub(r" \(\d+ characters\)", "", message)
    return message.partition(" (at ")[0].partition(" while processing")[0][:90]

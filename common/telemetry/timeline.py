"""When each thing happened to one request inside one process, and the stages between (DESIGN §3, TTFT taken apart).

Owns: event names and the differences between them. A stage is always a difference of two named events.
Does not know: other processes; the proxy adds up what each of them reports.
"""

from dataclasses import dataclass, field
from enum import Enum

from common.clock import Clock


class Event(Enum):
    """Transitions of a request, in the order they can happen inside one engine."""

    RECEIVED = "received"
    ADMITTED = "admitted"
    GRAMMAR_READY = "grammar_ready"
    PULL_STARTED = "pull_started"
    PULL_DONE = "pull_done"
    SCHEDULED = "scheduled"
    FIRST_TOKEN = "first_token"
    HANDED_OFF = "handed_off"
    ANSWERED = "answered"
    FINISHED = "finished"
    COMPLETED = "completed"


@dataclass(slots=True)
class Timeline:
    """First occurrence of each event, in the engine's own clock. Not thread-safe; one owner at a time."""

    clock: Clock
    at_s: dict[Event, float] = field(default_factory=dict)

    def mark(self, event: Event) -> None:
        """Remember now as the first time of `event`; later calls change nothing."""
        self.at_s.setdefault(event, self.clock.now_s())

    def between_s(self, start: Event, end: Event) -> float | None:
        """Seconds from `start` to `end`, or None while one of them has not happened."""
        if start not in self.at_s or end not in self.at_s:
            return None
        return self.at_s[end] - self.at_s[start]


DECODE = "decode"
"""What an answer in one piece was still waited for after its first token: ANSWERED to COMPLETED, no part of TTFT."""

STAGES = (
    # stage      from               ends at the first of these that happened
    ("front", Event.ADMITTED),
    ("grammar", Event.GRAMMAR_READY),
    ("queue", Event.PULL_STARTED),
    ("pull", Event.PULL_DONE),
    ("schedule", Event.SCHEDULED),
    ("compute", Event.FIRST_TOKEN),
    ("handoff", Event.HANDED_OFF),
    ("answer", Event.ANSWERED),
)
"""Stage → the event that ends it. It starts where the one before it ended, so stages always add up to the whole:

    RECEIVED ─front─ ADMITTED ─grammar─ GRAMMAR_READY ─queue─ PULL_STARTED ─pull─ PULL_DONE ─schedule─ SCHEDULED
      ─compute─ FIRST_TOKEN ─handoff─ HANDED_OFF ─answer─ ANSWERED (response handed to the socket)

A stage whose event never happened (no grammar, no pull) is absent, and its time falls to the next one.
"""


def stages_s(timeline: Timeline) -> dict[str, float]:
    """Seconds per stage of what has happened so far; they sum to (last event of STAGES) - RECEIVED exactly."""
    result: dict[str, float] = {}
    last_s = timeline.at_s.get(Event.RECEIVED)
    if last_s is None:
        return result
    for name, end in STAGES:
        end_s = timeline.at_s.get(end)
        if end_s is None:
            continue
        result[name] = max(0.0, end_s - last_s)
        last_s = max(last_s, end_s)
    return result


def whole_s(timeline: Timeline) -> dict[str, float]:
    """Stages of an answer in one piece: those of its first token, then `decode`; they sum to COMPLETED - RECEIVED."""
    return {**stages_s(timeline), DECODE: timeline.between_s(Event.ANSWERED, Event.COMPLETED) or 0.0}

"""Token counts of one answer, and the words of its ends.

Owns: the arithmetic of `usage` and the mapping of finish reasons. Does not know: JSON.
"""

from common.engine.request_state import FinishReason
from common.openai.responses import PromptTokensDetails, TimelineReport, Usage
from common.serving.generation import ChoiceDelta
from common.serving.job import Job
from common.telemetry.timeline import Event, Timeline, stages_s


class Tally:
    """Counts while deltas pass."""

    def __init__(self, job: Job, *, count_output: bool = True) -> None:
        self._prompt_tokens = sum(len(request.prompt_token_ids) for request in job.requests)
        self._cached: dict[int, int] = {}
        self._output_tokens = 0
        self._count_output = count_output

    def add(self, delta: ChoiceDelta) -> None:
        """Count one delta."""
        if self._count_output:
            self._output_tokens += len(delta.token_ids)
        self._cached.setdefault(delta.prompt_index, delta.tokens.num_cached_tokens)

    def usage(self) -> Usage:
        """The counts so far."""
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._output_tokens,
            total_tokens=self._prompt_tokens + self._output_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached.values())),
        )


def finish_word(finish: FinishReason | None, *, called_tools: bool = False) -> str | None:
    """OpenAI's word. A handoff ends after one token, which is what `length` means; tool calls count when complete."""
    if finish is None:
        return None
    if finish is FinishReason.HANDED_OFF:
        finish = FinishReason.LENGTH
    elif finish is FinishReason.STOP and called_tools:
        finish = FinishReason.TOOL_CALLS
    return str(finish.value)


def timeline_report(timeline: Timeline) -> TimelineReport:
    """Stages and events in milliseconds."""
    start_s = timeline.at_s.get(Event.RECEIVED, 0.0)
    return TimelineReport(
        stages_ms={name: round(seconds * 1000, 3) for name, seconds in stages_s(timeline).items()},
        events_ms={event.value: round((at_s - start_s) * 1000, 3) for event, at_s in timeline.at_s.items()},
    )

"""One HTTP request after every check: what to generate, and what the answer shall hold (journey row 5 → 9).

Owns: the frozen values between preparing, generating and answering. Does not know: bodies, HTTP.
"""

from dataclasses import dataclass
from enum import Enum

from common.engine.request import GenerateRequest
from common.telemetry.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """What the answer shall hold beside the text.

    Attributes:
        stream: events instead of one body.
        include_usage: a last event with the token counts.
        continuous_usage: the counts so far in every event.
        timeline: the stages of the time to first token.
        token_ids: prompt and output token ids.
        tokens_as_ids: logprobs name tokens by id.
        logprobs: alternatives per output position to show; None shows none.
        prompt_logprobs: whether vLLM's `prompt_logprobs` were asked for.
    """

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    timeline: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False
    logprobs: int | None = None
    prompt_logprobs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What both endpoints have in common.

    Attributes:
        answer_id: the `id` of the answer.
        requests: one per prompt, in the order of the prompts.
        timeline: of the whole HTTP request; the requests share it.
        kind: metric label, `free` or the constraint's.
        num_choices: choices per prompt.
    """

    answer_id: str
    model: str
    created_s: int
    requests: tuple[GenerateRequest, ...]
    timeline: Timeline
    kind: str
    num_choices: int
    options: AnswerOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionJob:
    """`/v1/completions`.

    Attributes:
        echo: each prompt's text to begin its choices with; None without `echo`.
        only_prompt: `max_tokens: 0` with `echo`: nothing of what is generated is shown.
    """

    job: Job
    echo: tuple[str, ...] | None = None
    only_prompt: bool = False


class ToolForm(Enum):
    """How tool calls stand in the text."""

    NONE = "none"
    TAGGED = "tagged"
    NAMED = "named"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatJob:
    """`/v1/chat/completions`.

    Attributes:
        tool_form: how to find tool calls.
        tool_name: the tool of `ToolForm.NAMED`.
        thinking_opened: the prompt ends inside the model's thinking.
        show_reasoning: whether the answer holds the reasoning, or drops it.
    """

    job: Job
    tool_form: ToolForm = ToolForm.NONE
    tool_name: str | None = None
    thinking_opened: bool = False
    show_reasoning: bool = True

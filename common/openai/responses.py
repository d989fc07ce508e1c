"""Whole answers in OpenAI's form, with vLLM's additions (journey row 9).

Owns: the JSON of completions, chat completions, logprobs, usage and the model list. Fields that OpenAI always writes
are null when there is nothing to say; vLLM's and our own are absent.
Does not know: streams (openai.stream), tokens, engines.
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

LOGPROB_FLOOR = -9999.0
"""What an infinitely unlikely token is reported as: JSON has no infinity (vLLM uses the same floor)."""


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """`cached_tokens`: prompt tokens whose KV was not computed by the answering engine (prefix cache or pull)."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts over all choices; a prompt counts once, however many choices it has."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class TimelineReport(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time to first token went inside this engine, on request (`timeline: true`).

    `stages_ms` add up to received → answered; `events_ms` counts from received.
    """

    stages_ms: dict[str, float]
    events_ms: dict[str, float]


class ConstraintCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Ours: a constraint that could not be enforced exactly (`on_inexact: validate`), and how the finished text fared.

    Attributes:
        unenforced: the schema's keywords that generation did not obey.
        valid: whether the text obeys the whole constraint all the same.
        reason: what is wrong when it does not.
    """

    unenforced: tuple[str, ...]
    valid: bool
    reason: str | None


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Parallel lists, one entry per token; `text_offset` counts characters of the choice's text."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One alternative at one position; `bytes` are the token's own, also where they are not UTF-8 alone."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen token of one position and its alternatives."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Logprobs of a chat choice."""

    content: list[ChatLogprob]


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's `prompt_logprobs` entry of one token id at one prompt position."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By position; the first is null, keys are token ids."""


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of a completion. `prompt_*` ride on the first choice of each prompt, as in vLLM."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    constraint_check: ConstraintCheck | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/v1/completions`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    timeline: TimelineReport | UnsetType = UNSET


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """`arguments` is JSON text."""

    name: str
    arguments: str


class CalledTool(msgspec.Struct, frozen=True, kw_only=True):
    """One tool call of the answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's message; `content` is null when it only calls tools."""

    role: str = "assistant"
    content: str | None
    refusal: str | None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CalledTool] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of a chat."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: tuple[int, ...] | UnsetType = UNSET
    constraint_check: ConstraintCheck | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | None = None
    timeline: TimelineReport | UnsetType = UNSET


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One served model; `root` is where its weights come from."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "pd-serve"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/tokenize`, as vLLM's."""

    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/detokenize`."""

    prompt: str


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/prepare`: the grammar is ready; `key` names it for warm routing."""

    state: Literal["ready"] = "ready"
    backend: str
    compile_ms: float
    key: str


def finite(logprob: float) -> float:
    """`logprob` with minus infinity (and anything below the floor) raised to the floor."""
    return logprob if logprob > LOGPROB_FLOOR else LOGPROB_FLOOR

"""Request bodies of `/v1/completions`, `/v1/chat/completions` and vLLM's `/tokenize`, `/detokenize` (journey row 1).

Owns: field names, types, and the 400 that names a mistyped field. One body is read as several small structs, each
taking the fields of its concern; fields that no struct knows are tolerated.
Does not know: ranges and vocabularies (sampling.validation), constraints (openai.constraint), what a field is used for.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import msgspec

from common.errors import InvalidRequest

T = TypeVar("T")
Scalar = str | int | float | bool

_AT_PATH = re.compile(r" - at `(?:key in )?\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"^Object missing required field `(?P<field>[^`]*)`")


class KvFields(msgspec.Struct, frozen=True, kw_only=True):
    """What says where the KV comes from or goes to; read first, so that a refusal of the rest can still release it."""

    kv_transfer_params: dict[str, Any] | None = None


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a stream reports usage: in a last chunk of its own, in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class AnswerFields(msgspec.Struct, frozen=True, kw_only=True):
    """What shapes the answer on both endpoints.

    Attributes:
        model: None is the served model.
        timeline: ours: add the stages of the time to first token to the answer.
        return_token_ids: vLLM: add prompt and output token ids to the answer.
        return_tokens_as_token_ids: vLLM: logprobs name tokens `token_id:17`.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    timeline: bool = False
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters as written, under vLLM 0.32's names; None where the body is silent or says null."""

    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    min_completion_tokens: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] | None = None
    thinking_token_budget: int | None = None
    repetition_detection: dict[str, int] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    use_beam_search: bool | None = None
    detokenize: bool | None = None
    vllm_xargs: dict[str, Scalar | tuple[Scalar, ...]] | None = None


class CompletionFields(msgspec.Struct, frozen=True, kw_only=True):
    """`/v1/completions` only."""

    prompt: str | tuple[str | int | tuple[int, ...], ...]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool = True
    prompt_embeds: Any = None


class ContentPart(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a message's content; only text has a meaning for a text model."""

    type: str
    text: str | None = None


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    """The call of an earlier assistant message; `arguments` is JSON text."""

    name: str
    arguments: str = ""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One tool call of an earlier assistant message."""

    function: FunctionCall
    id: str | None = None
    type: str = "function"


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of the conversation."""

    role: str
    content: str | tuple[ContentPart, ...] | None = None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class FunctionDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """What the model may call; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """One tool; OpenAI knows functions, so do we."""

    function: FunctionDefinition
    type: str = "function"


class ChatFields(msgspec.Struct, frozen=True, kw_only=True):
    """`/v1/chat/completions` only. `tool_choice` and `response_format` are read by `openai.constraint`."""

    messages: tuple[Message, ...]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: tuple[Tool, ...] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: tuple[dict[str, Any], ...] | None = None
    echo: bool | None = None
    include_reasoning: bool = True
    functions: Any = None
    function_call: Any = None
    modalities: tuple[str, ...] | None = None
    audio: Any = None


class TokenizeFields(msgspec.Struct, frozen=True, kw_only=True):
    """`/tokenize`: a prompt, or a chat as `ChatFields` where `messages` is present."""

    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeFields(msgspec.Struct, frozen=True, kw_only=True):
    """`/detokenize`."""

    tokens: tuple[int, ...]


class PrepareFields(msgspec.Struct, frozen=True, kw_only=True):
    """`/prepare`: the constraint's own fields are read by `openai.constraint`."""

    model: str | None = None


def read(body: bytes, fields: type[T]) -> T:
    """The fields of `fields` out of a JSON object; others are skipped.

    Raises:
        InvalidRequest: not JSON, not an object, a missing or mistyped field (`param` is its path).
    """
    try:
        return msgspec.json.decode(body, type=fields, strict=True)
    except msgspec.ValidationError as error:
        raise _explained(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error


def convert(value: Mapping[str, Any], fields: type[T]) -> T:
    """As `read`, of a mapping already decoded.

    Raises:
        InvalidRequest: a missing or mistyped field (`param` is its path).
    """
    try:
        return msgspec.convert(value, fields, strict=True)
    except msgspec.ValidationError as error:
        raise _explained(str(error)) from error


def read_mapping(body: bytes, without: Collection[str] = ()) -> dict[str, Any]:
    """The body as a mapping, for readers that look at fields of any type.

    Args:
        body: JSON.
        without: fields to leave out; their values, possibly long, are not decoded.

    Raises:
        InvalidRequest: as `read`.
    """
    fields = read(body, dict[str, msgspec.Raw])
    return {name: read(bytes(value), object) for name, value in fields.items() if name not in without}


def _explained(message: str) -> InvalidRequest:
    found = _AT_PATH.search(message)
    reason = message[: found.start()] if found else message
    path = found["path"] if found else ""
    if missing := _MISSING.match(reason):
        path = f"{path}.{missing['field']}" if path else missing["field"]
        return InvalidRequest(f"`{path}` is missing", param=path)
    where = f"`{path}`" if path else "the body"
    return InvalidRequest(f"{where}: {reason[0].lower()}{reason[1:]}", param=path or None)

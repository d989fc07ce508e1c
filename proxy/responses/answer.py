"""A Responses object out of a chat completion.

Owns: the shape of the object and its output items. Does not know: streams, HTTP.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from uuid import uuid4

import msgspec

from common.errors import UpstreamBroken
from proxy.call import NULL


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct):
    """A tool call, whole or a piece of one."""

    index: int = 0
    id: str | None = None
    function: _Function = msgspec.field(default_factory=_Function)


class Message(msgspec.Struct):
    """What a model said, whole or a piece of it."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None

    @property
    def thought(self) -> str:
        """The thinking, under either of the names it goes by."""
        return self.reasoning_content or self.reasoning or ""


class ChatChoice(msgspec.Struct):
    """A choice of a completion (`message`) or of a chunk (`delta`)."""

    message: Message | None = None
    delta: Message | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _OutputDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class ChatUsage(msgspec.Struct):
    """Token counts of a chat."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _OutputDetails | None = None


class ChatAnswer(msgspec.Struct):
    """What is read of a chat completion or of one of its chunks."""

    created: int = 0
    model: str = ""
    choices: list[ChatChoice] = []
    usage: ChatUsage | None = None
    error: msgspec.Raw | None = None


chat_answer = msgspec.json.Decoder(ChatAnswer)

_DEFAULTS: Mapping[str, object] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
}
_FIXED: Mapping[str, object] = {
    "background": False,
    "error": None,
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "store": False,
    "top_logprobs": 0,
    "truncation": "disabled",
    "user": None,
}


@dataclass(slots=True)
class ResponseObject:
    """The object, while it grows.

    Args:
        echoed: the request's fields that it repeats.
    """

    echoed: Mapping[str, msgspec.Raw]
    id: str = field(default_factory=lambda: f"resp_{uuid4().hex}")
    created_at: int = 0
    model: str = ""
    status: str = "in_progress"
    output: list[dict[str, object]] = field(default_factory=list)
    incomplete_reason: str | None = None
    usage: ChatUsage | None = None

    def take_head(self, chat: ChatAnswer) -> None:
        """What every chunk repeats."""
        self.created_at = chat.created
        self.model = chat.model

    def finish(self, finish_reason: str | None) -> None:
        """The chat's finish reason as a status."""
        reasons = {"length": "max_output_tokens", "content_filter": "content_filter"}
        self.incomplete_reason = reasons.get(finish_reason or "")
        self.status = "completed" if self.incomplete_reason is None else "incomplete"

    def to_json(self) -> dict[str, object]:
        """The object."""
        echoed = {name: raw for name, raw in self.echoed.items() if bytes(raw) != NULL}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "status": self.status,
            "model": self.model,
            "output": self.output,
            "incomplete_details": None if self.incomplete_reason is None else {"reason": self.incomplete_reason},
            "usage": None if self.usage is None else usage_json(self.usage),
            **_FIXED,
            **_DEFAULTS,
            **echoed,
        }


def usage_json(usage: ChatUsage) -> dict[str, object]:
    """Token counts under their Responses names."""
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    thinking = usage.completion_tokens_details.reasoning_tokens if usage.completion_tokens_details else 0
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": thinking},
        "total_tokens": usage.total_tokens,
    }


def reasoning_item(text: str, item_id: str, status: str = "completed") -> dict[str, object]:
    """An output item that holds thinking."""
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"type": "reasoning", "id": item_id, "summary": [], "content": content, "status": status}


def text_part(text: str) -> dict[str, object]:
    """A piece of a message's content."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def message_item(text: str, item_id: str, status: str = "completed") -> dict[str, object]:
    """An output item that holds text; empty while it has not begun."""
    content = [text_part(text)] if status != "in_progress" else []
    return {"type": "message", "id": item_id, "role": "assistant", "status": status, "content": content}


def call_item(call: ToolCall, item_id: str, status: str = "completed") -> dict[str, object]:
    """An output item that asks for a function call."""
    return {
        "type": "function_call",
        "id": item_id,
        "call_id": call.id or f"call_{uuid4().hex}",
        "name": call.function.name or "",
        "arguments": call.function.arguments or "",
        "status": status,
    }


def whole_answer(chat_body: bytes, echoed: Mapping[str, msgspec.Raw]) -> bytes:
    """The Responses object of a complete chat answer.

    Raises:
        UpstreamBroken: the chat answer makes no sense.
    """
    try:
        chat = chat_answer.decode(chat_body)
        choice = chat.choices[0]
    except (msgspec.MsgspecError, IndexError) as error:
        raise UpstreamBroken("the decode engine's answer is no chat completion") from error
    response = ResponseObject(echoed)
    response.take_head(chat)
    response.usage = chat.usage
    response.finish(choice.finish_reason)
    message = choice.message or Message()
    if message.thought:
        response.output.append(reasoning_item(message.thought, f"rs_{uuid4().hex}"))
    if message.content or not message.tool_calls:
        response.output.append(message_item(message.content or "", f"msg_{uuid4().hex}", response.status))
    for call in message.tool_calls or ():
        response.output.append(call_item(call, f"fc_{uuid4().hex}", response.status))
    return msgspec.json.encode(response.to_json())

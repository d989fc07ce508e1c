"""A Responses request as a chat request (OpenAI's Responses API; only what needs no stored state).

Owns: which fields exist, which are refused and why, how input items become messages.
Does not know: answers. Fields that it does not interpret go on to the engines as they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from common.errors import InvalidRequest
from proxy.call import NULL, parse_fields, render

T = TypeVar("T")

_STATE = "this deployment stores nothing: send the whole conversation in `input`"
_REFUSED = {
    "previous_response_id": _STATE,
    "conversation": _STATE,
    "prompt": "stored prompts are not supported: send `instructions` and `input`",
    "background": "answers are given at once or not at all",
    "max_tool_calls": "tools are called by the client, which can count them",
}
_RENAMED = {"max_output_tokens": "max_completion_tokens"}
_ECHOED = ("instructions", "max_output_tokens", "metadata", "temperature", "text", "tool_choice", "tools", "top_p")
_OWN = {
    *("input", "instructions", "text", "tools", "tool_choice", "store", "truncation", "include", "metadata"),
    *("reasoning", "service_tier", "stream_options", "safety_identifier", "prompt_cache_key"),
}
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    image_url: str | None = None


class _Item(msgspec.Struct):
    type: str = "message"
    role: str | None = None
    content: str | list[_Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[_Part] | None = None


class _Format(msgspec.Struct):
    type: str = "text"
    name: str = "response"
    strict: bool | None = None
    schema: msgspec.Raw = msgspec.Raw(NULL)


class _Text(msgspec.Struct):
    format: _Format = msgspec.field(default_factory=_Format)


class _Tool(msgspec.Struct, omit_defaults=True):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: msgspec.Raw = msgspec.Raw(NULL)
    strict: bool | None = None


class _NamedTool(msgspec.Struct):
    type: str
    name: str | None = None


class _Reasoning(msgspec.Struct):
    effort: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest:
    """A Responses request.

    Attributes:
        chat_body: the chat request that serves it.
        is_stream: whether events were asked for.
        echoed: fields that the answer repeats, as the client spelled them.
    """

    chat_body: bytes
    is_stream: bool
    echoed: Mapping[str, msgspec.Raw] = field(default_factory=dict)


def translate(body: bytes) -> ResponsesRequest:
    """The chat request.

    Raises:
        InvalidRequest: not a Responses request, or one that needs stored state.
    """
    fields = parse_fields(body)
    _refuse(fields)
    unknown = {name: raw for name, raw in fields.items() if name not in _OWN | _REFUSED.keys() | _RENAMED.keys()}
    chat: dict[str, bytes | msgspec.Raw] = dict(unknown)
    for old, new in _RENAMED.items():
        if bytes(fields.get(old, NULL)) != NULL:
            chat[new] = fields[old]
    messages = _messages(fields)
    chat["messages"] = msgspec.json.encode(messages)
    is_stream = bytes(fields.get("stream", NULL)) == b"true"
    if is_stream:
        chat["stream_options"] = b'{"include_usage":true}'
    if (response_format := _response_format(fields)) is not None:
        chat["response_format"] = response_format
    if bytes(fields.get("tools", NULL)) != NULL:
        chat["tools"] = msgspec.json.encode(_tools(fields["tools"]))
    if bytes(fields.get("tool_choice", NULL)) != NULL:
        chat["tool_choice"] = _tool_choice(fields["tool_choice"])
    if (effort := _read(fields, "reasoning", _Reasoning, _Reasoning()).effort) is not None:
        chat["reasoning_effort"] = msgspec.json.encode(effort)
    echoed = {name: fields[name] for name in _ECHOED if name in fields}
    return ResponsesRequest(chat_body=render(chat), is_stream=is_stream, echoed=echoed)


def _refuse(fields: Mapping[str, msgspec.Raw]) -> None:
    for name, reason in _REFUSED.items():
        if bytes(fields.get(name, NULL)) not in (NULL, b"false"):
            raise InvalidRequest(f"`{name}` is not supported: {reason}", param=name)
    if bytes(fields.get("store", NULL)) == b"true":
        raise InvalidRequest(f"`store: true` is not supported: {_STATE}", param="store")
    if bytes(fields.get("include", NULL)) not in (NULL, b"[]"):
        raise InvalidRequest("`include` is not supported: answers hold all there is", param="include")
    if bytes(fields.get("truncation", NULL)) not in (NULL, b'"disabled"'):
        raise InvalidRequest("`truncation` must be `disabled`: nothing is cut off the input", param="truncation")


def _read(fields: Mapping[str, msgspec.Raw], name: str, type_: type[T], default: T) -> T:
    raw = fields.get(name)
    if raw is None or bytes(raw) == NULL:
        return default
    try:
        return msgspec.json.decode(raw, type=type_)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"`{name}`: {error}", param=name) from error


def _messages(fields: Mapping[str, msgspec.Raw]) -> list[dict[str, object]]:
    if "input" not in fields:
        raise InvalidRequest("`input` is missing", param="input")
    messages: list[dict[str, object]] = []
    instructions = _read(fields, "instructions", str, "")
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if bytes(fields["input"]).lstrip()[:1] == b'"':
        messages.append({"role": "user", "content": _read(fields, "input", str, "")})
        return messages
    for number, item in enumerate(_read(fields, "input", list[_Item], [])):
        _add_item(messages, item, f"input[{number}]")
    return messages


def _add_item(messages: list[dict[str, object]], item: _Item, param: str) -> None:
    if item.type == "message":
        role = _ROLES.get(item.role or "")
        if role is None:
            raise InvalidRequest(f"the role must be one of {', '.join(_ROLES)}", param=f"{param}.role")
        messages.append({"role": role, "content": _content(item.content, param)})
    elif item.type == "function_call":
        function = {"name": item.name, "arguments": item.arguments or "{}"}
        call = {"id": item.call_id, "type": "function", "function": function}
        last = messages[-1] if messages else None
        # Calls of one turn are items of their own there, and one message here.
        if last is not None and last["role"] == "assistant" and isinstance(last.get("tool_calls"), list):
            last["tool_calls"] = [*last["tool_calls"], call]  # type: ignore[misc]  # the line above says it is a list
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif item.type == "function_call_output":
        output = _content(item.output, param)
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
    elif item.type != "reasoning":  # thoughts of earlier turns are not shown to the model again
        raise InvalidRequest(f"input items of type {item.type!r} are not supported", param=f"{param}.type")


def _content(content: str | list[_Part] | None, param: str) -> object:
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[dict[str, object]] = []
    for part in content:
        if part.type in ("input_text", "output_text", "text") and part.text is not None:
            parts.append({"type": "text", "text": part.text})
        elif part.type == "input_image" and part.image_url is not None:
            parts.append({"type": "image_url", "image_url": {"url": part.image_url}})
        else:
            raise InvalidRequest(f"content of type {part.type!r} is not supported", param=f"{param}.content")
    only_text = len(parts) == 1 and parts[0]["type"] == "text"
    return parts[0]["text"] if only_text else parts


def _response_format(fields: Mapping[str, msgspec.Raw]) -> bytes | None:
    wanted = _read(fields, "text", _Text, _Text()).format
    if wanted.type == "text":
        return None
    if wanted.type != "json_schema":
        return msgspec.json.encode({"type": wanted.type})
    schema = {"name": wanted.name, "schema": wanted.schema, "strict": wanted.strict}
    return msgspec.json.encode({"type": "json_schema", "json_schema": schema})


def _tools(raw: msgspec.Raw) -> list[dict[str, object]]:
    tools: list[dict[str, object]] = []
    for number, tool in enumerate(_read({"tools": raw}, "tools", list[_Tool], [])):
        if tool.type != "function":
            reason = f"tools of type {tool.type!r} are not supported: only functions"
            raise InvalidRequest(reason, param=f"tools[{number}].type")
        members = {"name": tool.name, "description": tool.description, "strict": tool.strict}
        function: dict[str, object] = {name: value for name, value in members.items() if value is not None}
        if bytes(tool.parameters) != NULL:
            function["parameters"] = tool.parameters
        tools.append({"type": "function", "function": function})
    return tools


def _tool_choice(raw: msgspec.Raw) -> bytes | msgspec.Raw:
    if bytes(raw).lstrip()[:1] != b"{":
        return raw
    choice = _read({"tool_choice": raw}, "tool_choice", _NamedTool, _NamedTool(type=""))
    if choice.type != "function" or choice.name is None:
        raise InvalidRequest("`tool_choice` must name a function", param="tool_choice")
    return msgspec.json.encode({"type": "function", "function": {"name": choice.name}})

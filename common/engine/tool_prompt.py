r"""Tools for models whose chat template knows none: described in the system message, called in `<tool_call>` tags.

Owns: that one convention (the widespread Hermes form, so the `hermes` tool parser reads the answers):

    system     ... + every tool as one line of JSON inside <tools></tools>, and how to call one
    assistant  <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>
    tool       becomes a user message: <tool_response>\n...\n</tool_response>
"""

import json
from collections.abc import Mapping, Sequence

_INTRODUCTION = (
    "You can call functions to answer. Their signatures, one JSON object per line, are inside <tools></tools>:"
)
_INSTRUCTION = (
    "To call a function, write one JSON object with its name and arguments inside <tool_call></tool_call>, like this:\n"
    '<tool_call>\n{"name": "function_name", "arguments": {"argument": "value"}}\n</tool_call>'
)


def fold_tools_into_messages(
    messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]]
) -> list[dict[str, object]]:
    """The conversation with tools, calls and results written as text.

    Args:
        messages: cleaned messages (string contents, call arguments as objects); not changed.
        tools: OpenAI tool definitions; empty leaves the system message as it is.

    Returns:
        Messages of the roles system, user and assistant only, with string contents.
    """
    folded = [_fold_message(message) for message in messages]
    if not tools:
        return folded
    section = describe_tools(tools)
    if folded and folded[0].get("role") == "system":
        folded[0]["content"] = f"{folded[0].get('content') or ''}\n\n{section}".lstrip("\n")
        return folded
    return [{"role": "system", "content": section}, *folded]


def describe_tools(tools: Sequence[Mapping[str, object]]) -> str:
    """The section of the system message that lists the tools and says how to call them."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return f"{_INTRODUCTION}\n<tools>\n{lines}\n</tools>\n{_INSTRUCTION}"


def _fold_message(message: Mapping[str, object]) -> dict[str, object]:
    folded = dict(message)
    if folded.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{folded.get('content') or ''}\n</tool_response>"}
    calls = folded.pop("tool_calls", None)
    if isinstance(calls, Sequence) and calls:
        parts = [str(folded["content"])] if folded.get("content") else []
        parts.extend(_write_call(call) for call in calls)
        folded["content"] = "\n".join(parts)
    return folded


def _write_call(call: Mapping[str, Mapping[str, object]]) -> str:
    function = call["function"]
    body = {"name": function.get("name"), "arguments": function.get("arguments")}
    return f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>"

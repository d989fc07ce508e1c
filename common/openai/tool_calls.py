"""Calls a model writes of its own accord, and the constraint that keeps them to the tools (`tool_choice: auto`).

    free text <tool_call>
    {"name": "f", "arguments": <f's parameters>}
    </tool_call>

From the start tag on, the call is one of the tools'; the arguments of a `strict` tool fit its schema, those of another
are some object. Text outside calls stays free.

Owns: what encloses a call, and that structural tag. Does not know: how a grammar follows it, what is shown of a call.
Source: vLLM 0.32 `tool_parsers/structural_tag_registry.py` (what `strict` and `parallel_tool_calls` constrain).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from common.errors import ConstraintRejected
from common.openai.tool_constraint import ANY_ARGUMENTS, parameters_by_name


@dataclass(frozen=True, slots=True)
class ToolTags:
    """What a model writes around one call."""

    start: str
    end: str


def own_calls_tag(tools: object, parallel: object, tags: ToolTags | None) -> Mapping[str, object] | None:
    """The structural tag of a request whose `tool_choice` forces nothing; None when nothing is to be kept.

    Args:
        tools: OpenAI `tools`.
        parallel: OpenAI `parallel_tool_calls`; false ends the answer after its first call.
        tags: how the served model encloses calls; None when it is not known.

    Raises:
        ConstraintRejected: mistyped tools, or a `strict` tool of a model whose calls are not read.
    """
    strict = strict_tools(tools)
    only_one = parallel is False and isinstance(tools, list | tuple) and len(tools) > 0
    if not strict and (not only_one or tags is None):
        return None
    if tags is None:
        message = "`strict` cannot be kept with `tool_choice: auto`: the engine has no `tool_parser` for this model"
        raise ConstraintRejected(message, f"tools.{strict[0]}.function.strict")
    members = []
    for index, (name, parameters) in enumerate(parameters_by_name(tools).items()):
        schema = parameters if index in strict else ANY_ARGUMENTS
        members.append(
            {
                "type": "tag",
                "begin": f'{tags.start}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ',
                "content": {"type": "json_schema", "json_schema": schema},
                "end": f"}}\n{tags.end}",
            }
        )
    form: dict[str, object] = {"type": "triggered_tags", "triggers": [tags.start], "tags": members}
    if only_one:
        form["stop_after_first"] = True
    return {"type": "structural_tag", "format": form}


def strict_tools(tools: object) -> tuple[int, ...]:
    """Places of the tools that say `strict: true`; none in what is no list of tools."""
    if not isinstance(tools, list | tuple):
        return ()
    functions = [tool.get("function") if isinstance(tool, Mapping) else None for tool in tools]
    return tuple(
        index
        for index, function in enumerate(functions)
        if isinstance(function, Mapping) and function.get("strict") is True
    )

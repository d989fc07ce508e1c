"""The JSON schema that a forced `tool_choice` turns into.

    named     the arguments of that tool, alone
    required  [{"name": <a tool's>, "parameters": <its arguments>}, ...], one or more; one if calls are not parallel

Owns: those two forms (vLLM 0.32's) and keeping `$ref` inside a tool's parameters pointing where it did.
Does not know: calls a model writes of its own accord (`tool_calls`).
"""

from collections.abc import Mapping

from common.errors import ConstraintRejected

Schema = Mapping[str, object]

_NOT_SCHEMAS = frozenset({"enum", "const", "default", "examples", "example"})
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
"""Keywords whose value maps names of the author's own to schemas."""
ANY_ARGUMENTS: Schema = {"type": "object"}
"""What a tool without `parameters` takes."""


def forced_tool_schema(tools: object, choice: object, parallel: object) -> Schema | None:
    """The schema of the whole output, or None when `tool_choice` forces nothing.

    Args:
        tools: OpenAI `tools`.
        choice: OpenAI `tool_choice`: null, `none`, `auto`, `required`, or `{"type": "function", "function": {"name"}}`.
        parallel: OpenAI `parallel_tool_calls`; false allows exactly one call.

    Raises:
        ConstraintRejected: mistyped, no tools to choose from, or a tool that is not there.
    """
    if choice is None or choice in ("none", "auto"):
        return None
    parameters = parameters_by_name(tools)
    if not parameters:
        raise ConstraintRejected("`tool_choice` needs `tools`", "tool_choice")
    if choice == "required":
        return _one_of_many(parameters, only_one=parallel is False)
    name = _chosen_name(choice)
    if name not in parameters:
        known = ", ".join(sorted(parameters))
        raise ConstraintRejected(f"no tool is named {name!r}; there are {known}", "tool_choice.function.name")
    return parameters[name]


def _one_of_many(parameters: Mapping[str, Schema], *, only_one: bool) -> Schema:
    definitions: dict[str, object] = {}
    calls: list[Schema] = []
    for index, (name, schema) in enumerate(parameters.items()):
        key = f"tool_{index}"
        definitions[key] = _moved(schema, f"#/$defs/{key}")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{key}"}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    call: Schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    array: dict[str, object] = {"type": "array", "minItems": 1, "items": call, "$defs": definitions}
    if only_one:
        array["maxItems"] = 1
    return array


def _moved(schema: object, place: str) -> object:
    """A copy of `schema` whose local references still resolve when it stands at `place`."""
    if isinstance(schema, list | tuple):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved: dict[str, object] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = place if value in ("#", "#/") else place + value[1:]
        elif key in _NOT_SCHEMAS:
            moved[key] = value
        elif key in _BY_NAME and isinstance(value, Mapping):
            moved[key] = {name: _moved(member, place) for name, member in value.items()}
        else:
            moved[key] = _moved(value, place)
    return moved


def parameters_by_name(tools: object) -> dict[str, Schema]:
    """Each tool's name and the schema of its arguments, in order.

    Raises:
        ConstraintRejected: mistyped, nameless, or two of one name.
    """
    if tools is None:
        return {}
    if not isinstance(tools, list | tuple):
        raise ConstraintRejected("`tools` is a list", "tools")
    parameters: dict[str, Schema] = {}
    for index, tool in enumerate(tools):
        field = f"tools.{index}"
        function = _member(tool, "function", field)
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise ConstraintRejected("a tool needs a name", f"{field}.function.name")
        if name in parameters:
            raise ConstraintRejected(f"two tools are named {name!r}", f"{field}.function.name")
        schema = function.get("parameters")
        if schema is not None and not isinstance(schema, Mapping):
            raise ConstraintRejected("`parameters` is a JSON schema", f"{field}.function.parameters")
        parameters[name] = schema or ANY_ARGUMENTS
    return parameters


def _chosen_name(choice: object) -> str:
    name = _member(choice, "function", "tool_choice").get("name")
    if not isinstance(name, str):
        raise ConstraintRejected("`tool_choice.function.name` is missing", "tool_choice.function.name")
    return name


def _member(value: object, name: str, field: str) -> Schema:
    member = value.get(name) if isinstance(value, Mapping) else None
    if not isinstance(member, Mapping):
        raise ConstraintRejected(f"`{name}` is missing or no object", f"{field}.{name}")
    return member

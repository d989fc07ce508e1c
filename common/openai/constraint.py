"""The constraint in a body: `response_format`, `structured_outputs`, `guided_*`, a forced `tool_choice`, strict tools.

Owns: reading exactly one constraint out of the body and naming the field that is wrong (journey rows 1, 3a, 5).
Does not know: what can be compiled or enforced; that is the grammar service's to say. Field names are vLLM 0.32's.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from common.errors import ConstraintRejected
from common.openai.tool_calls import ToolTags, own_calls_tag
from common.openai.tool_constraint import forced_tool_schema
from common.wire.constraint import Constraint, ConstraintKind

_LEGACY = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "structural_tag": "structural_tag",
}
"""Older top-level spellings and the option of `structured_outputs` each one became."""

_OPTIONS = frozenset(
    {"disable_any_whitespace", "disable_additional_properties", "whitespace_pattern", "disable_fallback"}
)
_RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag")


def parse_constraint(fields: Mapping[str, Any], tags: ToolTags | None = None) -> Constraint | None:
    """The one constraint of a body, or None.

    Calls of the model's own accord (`tool_choice: auto`) are constrained only where nothing else is: under a
    constraint on the whole output no call can begin.

    Args:
        fields: the decoded body, or those of its fields that say a constraint.
        tags: how the served model encloses calls of its own accord; None when that is not known.

    Raises:
        ConstraintRejected: mistyped, empty or contradictory; `param` is the field.
    """
    found = [
        constraint
        for constraint in (
            _from_response_format(fields.get("response_format")),
            _from_structured_outputs(fields.get("structured_outputs")),
            _from_legacy(fields),
            _from_tools(fields),
        )
        if constraint is not None
    ]
    if len(found) > 1:
        names = ", ".join(f"`{constraint.field}`" for constraint in found)
        raise ConstraintRejected(f"{names} each constrain the output; at most one may", found[1].field)
    return found[0] if found else _from_own_calls(fields, tags)


def _from_response_format(value: object) -> Constraint | None:
    field = "response_format"
    if value is None:
        return None
    body = _mapping(value, field)
    kind = body.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint(kind=ConstraintKind.JSON_OBJECT, value="", field=field)
    if kind == "json_schema":
        return _from_json_schema(body)
    if kind == "structural_tag":
        return Constraint(
            kind=ConstraintKind.STRUCTURAL_TAG, value=_encode(_known_tag(body, field), field), field=field
        )
    raise ConstraintRejected(f"`type` must be one of {', '.join(_RESPONSE_FORMATS)}", f"{field}.type")


def _from_json_schema(body: Mapping[str, object]) -> Constraint:
    """OpenAI's wrapper `json_schema: {name, schema, strict}`, or the bare `schema` beside `type`."""
    if "json_schema" in body:
        field = "response_format.json_schema"
        wrapper = _mapping(body["json_schema"], field)
        if "schema" not in wrapper:
            raise ConstraintRejected("`schema` is missing", f"{field}.schema")
        field, schema = f"{field}.schema", wrapper["schema"]
    elif "schema" in body:
        field, schema = "response_format.schema", body["schema"]
    else:
        raise ConstraintRejected("`json_schema` is missing", "response_format.json_schema")
    return Constraint(kind=ConstraintKind.JSON_SCHEMA, value=_schema_text(schema, field), field=field)


def _from_structured_outputs(value: object) -> Constraint | None:
    field = "structured_outputs"
    if value is None:
        return None
    body = {name: option for name, option in _mapping(value, field).items() if option is not None}
    unknown = sorted(body.keys() - _READERS.keys() - _OPTIONS)
    if unknown:
        known = ", ".join(sorted(_READERS.keys() | _OPTIONS))
        raise ConstraintRejected(f"`{unknown[0]}` is not one of {known}", f"{field}.{unknown[0]}")
    kinds = [name for name in _READERS if name in body]
    if len(kinds) != 1:
        named = ", ".join(kinds) or "none"
        raise ConstraintRejected(f"exactly one of {', '.join(_READERS)} is needed; here: {named}", field)
    return _READERS[kinds[0]](body[kinds[0]], f"{field}.{kinds[0]}", _options(body, field))


def _from_legacy(fields: Mapping[str, object]) -> Constraint | None:
    present = [name for name in _LEGACY if fields.get(name) is not None]
    if len(present) > 1:
        raise ConstraintRejected(f"`{present[0]}` and `{present[1]}` exclude each other", present[1])
    if not present:
        return None
    options: dict[str, Any] = {}
    pattern = fields.get("guided_whitespace_pattern")
    if pattern is not None:
        options["whitespace_pattern"] = _non_empty(pattern, "guided_whitespace_pattern")
    return _READERS[_LEGACY[present[0]]](fields[present[0]], present[0], options)


def _from_tools(fields: Mapping[str, object]) -> Constraint | None:
    schema = forced_tool_schema(fields.get("tools"), fields.get("tool_choice"), fields.get("parallel_tool_calls"))
    if schema is None:
        return None
    value = _encode(schema, "tools")
    return Constraint(kind=ConstraintKind.JSON_SCHEMA, value=value, from_tool=True, field="tool_choice")


def _from_own_calls(fields: Mapping[str, object], tags: ToolTags | None) -> Constraint | None:
    if fields.get("tool_choice") == "none":
        return None
    tag = own_calls_tag(fields.get("tools"), fields.get("parallel_tool_calls"), tags)
    if tag is None:
        return None
    value = _encode(tag, "tools")
    return Constraint(kind=ConstraintKind.STRUCTURAL_TAG, value=value, from_tool=True, field="tools")


def _options(body: Mapping[str, object], field: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, target in (
        ("disable_any_whitespace", "any_whitespace"),
        ("disable_additional_properties", "additional_properties"),
    ):
        if name in body:
            options[target] = not _boolean(body[name], f"{field}.{name}")
    if "whitespace_pattern" in body:
        name = f"{field}.whitespace_pattern"
        options["whitespace_pattern"] = _non_empty(body["whitespace_pattern"], name)
        if not options.get("any_whitespace", True):
            raise ConstraintRejected("`disable_any_whitespace` and `whitespace_pattern` exclude each other", name)
    return options


def _read_json(value: object, field: str, options: Mapping[str, Any]) -> Constraint:
    return Constraint(kind=ConstraintKind.JSON_SCHEMA, value=_schema_text(value, field), field=field, **options)


def _read_json_object(value: object, field: str, options: Mapping[str, Any]) -> Constraint:
    if _boolean(value, field) is False:
        raise ConstraintRejected("`json_object` is true or left out", field)
    return Constraint(kind=ConstraintKind.JSON_OBJECT, value="", field=field, **options)


def _read_regex(value: object, field: str, options: Mapping[str, Any]) -> Constraint:
    return Constraint(kind=ConstraintKind.REGEX, value=_non_empty(value, field), field=field, **options)


def _read_grammar(value: object, field: str, options: Mapping[str, Any]) -> Constraint:
    return Constraint(kind=ConstraintKind.GRAMMAR, value=_non_empty(value, field), field=field, **options)


def _read_choice(value: object, field: str, options: Mapping[str, Any]) -> Constraint:
    if not isinstance(value, list | tuple) or not value:
        raise ConstraintRejected("a non-empty list of strings is needed", field)
    for index, choice in enumerate(value):
        _non_empty(choice, f"{field}.{index}", blank_is_empty=False)
    distinct = list(dict.fromkeys(value))
    return Constraint(kind=ConstraintKind.CHOICE, value=_encode(distinct, field), field=field, **options)


def _read_structural_tag(value: object, field: str, options: Mapping[str, Any]) -> Constraint:
    body = _mapping(_decoded(value, field) if isinstance(value, str) else value, field)
    tag = _encode(_known_tag(body, field), field)
    return Constraint(kind=ConstraintKind.STRUCTURAL_TAG, value=tag, field=field, **options)


_READERS: Mapping[str, Callable[[object, str, Mapping[str, Any]], Constraint]] = {
    "json": _read_json,
    "json_object": _read_json_object,
    "regex": _read_regex,
    "choice": _read_choice,
    "grammar": _read_grammar,
    "structural_tag": _read_structural_tag,
}


def _known_tag(body: Mapping[str, object], field: str) -> Mapping[str, object]:
    """A structural tag in one of its two forms: `format`, or the older `structures` with `triggers`."""
    if "format" in body or ("structures" in body and "triggers" in body):
        return body
    raise ConstraintRejected("a structural tag has `format`, or `structures` and `triggers`", field)


def _schema_text(value: object, field: str) -> str:
    """A schema, given as an object or as its text, in canonical form: key order kept, spacing dropped."""
    if isinstance(value, str):
        value = _decoded(_non_empty(value, field), field)
    if isinstance(value, bool):
        return _encode(value, field)
    return _encode(_mapping(value, field), field)


def _decoded(text: str, field: str) -> object:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ConstraintRejected(f"not JSON: {error}", field) from error


def _encode(value: object, field: str) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (msgspec.MsgspecError, TypeError, UnicodeError, RecursionError, OverflowError) as error:
        raise ConstraintRejected(f"cannot be written as JSON: {error}", field) from error


def _mapping(value: object, field: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ConstraintRejected(f"an object is needed, not {_type_name(value)}", field)
    return value


def _non_empty(value: object, field: str, *, blank_is_empty: bool = True) -> str:
    if not isinstance(value, str):
        raise ConstraintRejected(f"a string is needed, not {_type_name(value)}", field)
    if not (value.strip() if blank_is_empty else value):
        raise ConstraintRejected("must not be empty", field)
    return value


def _boolean(value: object, field: str) -> bool:
    if not isinstance(value, bool):
        raise ConstraintRejected(f"true or false is needed, not {_type_name(value)}", field)
    return value


def _type_name(value: object) -> str:
    names = {
        dict: "an object",
        list: "an array",
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), "null")

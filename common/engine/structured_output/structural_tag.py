"""Structural tags: free text in which certain marks start a constrained part.

    free text <call>{"x": 1}</call> free text
              ^ trigger  ^ content ^ end

Owns: reading both wire forms, the JSON schemas inside them, and the two ways to compile one: as Lark for llguidance
where its lexer says the same, in xgrammar's own form otherwise. Pure.
"""

import json
from collections.abc import Iterator, Mapping, Sequence

from common.engine.structured_output.exactness import gaps
from common.engine.structured_output.json_rules import MAX_WHITESPACE
from common.engine.structured_output.json_schema import Schema, is_schema
from common.engine.structured_output.normalise import normalise
from common.errors import ConstraintRejected

_MAX_TAGS = 512


def read_format(value: str, field: str) -> Schema:
    """The `format` of a structural tag; the older `structures` with `triggers` is turned into it.

    Raises:
        ConstraintRejected: neither form.
    """
    tag = json.loads(value)
    if not is_schema(tag):
        raise ConstraintRejected("a structural tag is a JSON object", field)
    form = tag.get("format")
    if is_schema(form):
        return form
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise ConstraintRejected("a structural tag has `format`, or `structures` and `triggers`", field)
    return {
        "type": "triggered_tags",
        "triggers": triggers,
        "tags": [
            _from_structure(structure, f"{field}.structures.{index}") for index, structure in enumerate(structures)
        ],
    }


def _from_structure(structure: object, field: str) -> Schema:
    if not is_schema(structure) or not isinstance(structure.get("begin"), str):
        raise ConstraintRejected("a structure has `begin`, `schema` and `end`", field)
    schema = structure.get("schema", {})
    content = {"type": "json_schema", "json_schema": json.loads(schema) if isinstance(schema, str) else schema}
    return {"type": "tag", "begin": structure["begin"], "content": content, "end": structure.get("end", "")}


def json_parts(form: object) -> Iterator[Schema]:
    """Every `json_schema` part inside a format, as the mutable mapping it is."""
    if isinstance(form, list):
        for member in form:
            yield from json_parts(member)
    elif is_schema(form):
        if "json_schema" in form:
            yield form
        for keyword, member in form.items():
            if keyword != "json_schema":
                yield from json_parts(member)


def for_xgrammar(form: Schema, field: str) -> str:
    """The tag in xgrammar's form, its schemas closed (as xgrammar reads them there), its whitespace capped.

    Raises:
        ConstraintRejected: xgrammar would weaken a schema in it.
    """
    copy = json.loads(json.dumps(form))
    for part in json_parts(copy):
        schema = part["json_schema"]
        normal = normalise(schema, additional_properties=False) if is_schema(schema) else schema
        found = gaps("xgrammar", normal) if is_schema(normal) else ()
        if found:
            raise ConstraintRejected(f"cannot be enforced exactly inside a structural tag: {found[0]}", field)
        part["json_schema"] = normal
        if part.get("type") == "json_schema":
            part.setdefault("max_whitespace_cnt", MAX_WHITESPACE)
    return json.dumps({"type": "structural_tag", "format": copy}, ensure_ascii=False)


def as_lark(form: Schema, options: Mapping[str, object]) -> tuple[str, tuple[Schema, ...]] | None:
    """The tag as Lark for llguidance, and the schemas in it; None when only xgrammar has the form.

    Args:
        form: the format.
        options: llguidance's options for the JSON inside.
    """
    triggers, tags = form.get("triggers"), form.get("tags")
    if form.get("type") != "triggered_tags" or set(form) - {"type", "triggers", "tags", "stop_after_first"}:
        return None
    if not isinstance(triggers, list) or not isinstance(tags, list) or not 0 < len(tags) <= _MAX_TAGS:
        return None
    only_one = form.get("stop_after_first", False)
    if not isinstance(only_one, bool):
        return None
    parsed = [_parse_tag(tag, triggers) for tag in tags]
    known = [tag for tag in parsed if tag is not None]
    if len(known) < len(parsed):
        return None
    names = " | ".join(f"tag_{index}" for index in range(len(known)))
    # After the last call there is text without a trigger, or nothing: a trigger always begins another call.
    start = f"start: TEXT | ({names})" if only_one else f"start: ({names})* TEXT"
    lines = ["%llguidance {}", start, r"TEXT: /(.|\n)*/"]
    schemas: list[Schema] = []
    for index, (trigger, rest, schema, end) in enumerate(known):
        normal = normalise(schema)
        if not is_schema(normal):
            return None
        schemas.append(normal)
        text = json.dumps({**normal, "x-guidance": options}, ensure_ascii=False)
        lines.append(f"head_{index}[lazy]: TEXT {json.dumps(trigger)}")
        lines.append(f"tag_{index}: head_{index} {_literal(rest)} %json {text} {_literal(end)}")
    return "\n".join(lines), tuple(schemas)


def _parse_tag(tag: object, triggers: Sequence[object]) -> tuple[str, str, Schema, str] | None:
    """Trigger, rest of the begin mark, schema, end mark of a tag whose content is JSON."""
    if not is_schema(tag) or set(tag) - {"type", "begin", "content", "end"}:
        return None
    begin, content, end = tag.get("begin"), tag.get("content"), tag.get("end")
    if not isinstance(begin, str) or not isinstance(end, str) or not is_schema(content):
        return None
    schema = content.get("json_schema")
    if content.get("type") != "json_schema" or set(content) - {"type", "json_schema"} or not is_schema(schema):
        return None
    matching = [trigger for trigger in triggers if isinstance(trigger, str) and trigger and begin.startswith(trigger)]
    return (matching[0], begin[len(matching[0]) :], schema, end) if len(matching) == 1 else None


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""

"""JSON schemas as trees: where sub-schemas stand, walking them, replacing them.

Owns: the table of keywords that hold schemas. Pure. Does not know what any keyword means.
"""

from collections.abc import Callable, Iterator
from typing import TypeGuard

Schema = dict[str, object]
"""One object schema; values are JSON."""

SINGLE = frozenset(
    {
        "additionalItems",
        "additionalProperties",
        "contains",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    }
)
"""Keywords whose value is a schema (`items` may also be a list of them)."""

LISTS = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
"""Keywords whose value is a list of schemas."""

MAPS = frozenset({"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"})
"""Keywords whose value maps names to schemas (`dependencies` also to lists of names)."""

ANNOTATIONS = frozenset(
    {
        "$comment",
        "$id",
        "$schema",
        "default",
        "deprecated",
        "description",
        "example",
        "examples",
        "id",
        "readOnly",
        "title",
        "writeOnly",
    }
)
"""Keywords that allow and forbid nothing."""


MEANINGFUL = (
    SINGLE
    | LISTS
    | MAPS
    | frozenset(
        {
            "$anchor",
            "$dynamicAnchor",
            "$dynamicRef",
            "$recursiveAnchor",
            "$recursiveRef",
            "$ref",
            "const",
            "contentEncoding",
            "contentMediaType",
            "contentSchema",
            "dependentRequired",
            "enum",
            "exclusiveMaximum",
            "exclusiveMinimum",
            "format",
            "maxContains",
            "maxItems",
            "maxLength",
            "maxProperties",
            "maximum",
            "minContains",
            "minItems",
            "minLength",
            "minProperties",
            "minimum",
            "multipleOf",
            "pattern",
            "required",
            "type",
            "uniqueItems",
        }
    )
)
"""Keywords of some draft that are more than annotations; any other keyword is an annotation, says the specification."""


def meaning(schema: Schema) -> frozenset[str]:
    """The keywords of a node that may allow or forbid something."""
    return MEANINGFUL.intersection(schema) - {"$defs", "definitions"}


def is_schema(value: object) -> TypeGuard[Schema]:
    """Whether `value` is an object schema (booleans are schemas too, but hold nothing)."""
    return isinstance(value, dict)


def children(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Direct sub-schemas that are objects, each with its path below `schema`."""
    for keyword, value in schema.items():
        if keyword in SINGLE and is_schema(value):
            yield keyword, value
        elif keyword in LISTS and isinstance(value, list):
            yield from ((f"{keyword}/{index}", item) for index, item in enumerate(value) if is_schema(item))
        elif keyword in MAPS and is_schema(value):
            yield from ((f"{keyword}/{name}", item) for name, item in value.items() if is_schema(item))


def walk(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """`schema` and everything below it, each with its path (`#/properties/a`)."""
    pending = [("#", schema)]
    while pending:
        path, node = pending.pop()
        yield path, node
        pending.extend((f"{path}/{below}", child) for below, child in children(node))


def reachable(root: Schema) -> Iterator[tuple[str, Schema]]:
    """`walk`, and what local references reach outside the places where schemas usually stand; each node once."""
    pending, seen = [("#", root)], set()
    while pending:
        path, node = pending.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield path, node
        pending.extend((f"{path}/{below}", child) for below, child in children(node))
        reference = node.get("$ref")
        target = resolve(root, reference) if isinstance(reference, str) else None
        if is_schema(target):
            pending.append((str(reference), target))


def rebuild(schema: Schema, change: Callable[[Schema], object]) -> object:
    """A copy in which `change` was applied to every object schema, innermost first; the original is untouched.

    Args:
        schema: the root.
        change: gets a fresh copy it may edit, returns what stands in its place (a schema or a boolean).
    """
    copy: Schema = {}
    for keyword, value in schema.items():
        copy[keyword] = _rebuild_value(keyword, value, change)
    return change(copy)


def _rebuild_value(keyword: str, value: object, change: Callable[[Schema], object]) -> object:
    if keyword in SINGLE and is_schema(value):
        return rebuild(value, change)
    if keyword in LISTS and isinstance(value, list):
        return [rebuild(item, change) if is_schema(item) else item for item in value]
    if keyword in MAPS and is_schema(value):
        return {name: rebuild(item, change) if is_schema(item) else item for name, item in value.items()}
    return value


def resolve(root: Schema, reference: str) -> object:
    """What a local reference (`#`, `#/...`) points at; None when it is not local or dangling."""
    if reference in ("#", "#/"):
        return root
    if not reference.startswith("#/"):
        return None
    node: object = root
    for part in reference[2:].split("/"):
        key = part.replace("~1", "/").replace("~0", "~").replace("%25", "%").replace("%24", "$")
        if isinstance(node, dict):
            node = node.get(key)
        elif isinstance(node, list) and key.isdigit() and int(key) < len(node):
            node = node[int(key)]
        else:
            return None
    return node

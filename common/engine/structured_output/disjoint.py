"""Proofs that two JSON schemas share no value: what makes `oneOf` the same as `anyOf`.

Owns: the proof rules, each of which is sound; "not proven" says nothing. Pure. Does not know backends.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations

from common.engine.structured_output.json_schema import Schema, is_schema, resolve

_TYPES = frozenset({"null", "boolean", "object", "array", "number", "string"})
_MAX_DEPTH = 8
_SIZES = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
    "number": ("minimum", "maximum"),
}


class DisjointProver:
    """Proofs below one root.

    Args:
        root: what local references start from.
    """

    def __init__(self, root: Schema) -> None:
        self._root = root

    def all_disjoint(self, schemas: Sequence[object]) -> bool:
        """Whether every two of `schemas` are proven to share no value."""
        return all(self.disjoint(one, other) for one, other in combinations(schemas, 2))

    def disjoint(self, one: object, other: object, depth: int = 0) -> bool:
        """Whether no value can be valid for both."""
        if one is False or other is False:
            return True
        if not is_schema(one) or not is_schema(other) or depth > _MAX_DEPTH:
            return False
        left, right = list(self._conjuncts(one)), list(self._conjuncts(other))
        if self._split(left, other, depth) or self._split(right, one, depth):
            return True
        shared = _types(left) & _types(right)
        return all(self._disjoint_on(name, left, right, depth) for name in shared)

    def _conjuncts(self, schema: Schema, depth: int = 0) -> Iterator[Schema]:
        """Schemas that must all hold: itself, what it refers to, the members of its `allOf`."""
        yield schema
        if depth > _MAX_DEPTH:
            return
        members = schema.get("allOf")
        targets = [resolve(self._root, str(schema["$ref"]))] if "$ref" in schema else []
        for member in [*targets, *(members if isinstance(members, list) else [])]:
            if is_schema(member):
                yield from self._conjuncts(member, depth + 1)

    def _split(self, conjuncts: Sequence[Schema], other: object, depth: int) -> bool:
        """Whether some conjunct is a union all of whose members are disjoint from `other`."""
        for conjunct in conjuncts:
            for keyword in ("anyOf", "oneOf"):
                members = conjunct.get(keyword)
                if isinstance(members, list) and all(self.disjoint(member, other, depth + 1) for member in members):
                    return True
        return False

    def _disjoint_on(self, type_name: str, left: Sequence[Schema], right: Sequence[Schema], depth: int) -> bool:
        values, other_values = _values(left, type_name), _values(right, type_name)
        if values is not None and other_values is not None:
            return not any(_equal(value, other) for value in values for other in other_values)
        if values == [] or other_values == []:
            return True
        if _apart(_SIZES.get(type_name), left, right):
            return True
        return type_name == "object" and self._objects_disjoint(left, right, depth)

    def _objects_disjoint(self, left: Sequence[Schema], right: Sequence[Schema], depth: int) -> bool:
        """Whether a property that one side requires cannot have a value that suits both."""
        names = set(_required(left)) | set(_required(right))
        return any(
            self.disjoint(mine, theirs, depth + 1)
            for name in sorted(names)
            for mine in _property_schemas(left, name)
            for theirs in _property_schemas(right, name)
        )


def _types(conjuncts: Sequence[Schema]) -> frozenset[str]:
    """Types a value may have; integers count as numbers."""
    possible = _TYPES
    for conjunct in conjuncts:
        declared = conjunct.get("type")
        names = [declared] if isinstance(declared, str) else declared
        if isinstance(names, list):
            possible &= {"number" if name == "integer" else str(name) for name in names}
        values = _listed(conjunct)
        if values is not None:
            possible &= {_type_of(value) for value in values}
    return possible


def _listed(conjunct: Schema) -> list[object] | None:
    if "const" in conjunct:
        return [conjunct["const"]]
    values = conjunct.get("enum")
    return values if isinstance(values, list) else None


def _values(conjuncts: Sequence[Schema], type_name: str) -> list[object] | None:
    """The only values of `type_name` that the first listing conjunct allows; None when none lists any."""
    for conjunct in conjuncts:
        values = _listed(conjunct)
        if values is not None:
            return [value for value in values if _type_of(value) == type_name]
    return None


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _equal(one: object, other: object) -> bool:
    """JSON equality of values of the same type: true is not 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other


def _same(one: object, other: object) -> bool:
    return _type_of(one) == _type_of(other) and _equal(one, other)


def _apart(keywords: tuple[str, str] | None, left: Sequence[Schema], right: Sequence[Schema]) -> bool:
    """Whether the least of one side is above the most of the other."""
    if keywords is None:
        return False
    least, most = keywords
    return _above(left, least, right, most) or _above(right, least, left, most)


def _above(one: Sequence[Schema], least: str, other: Sequence[Schema], most: str) -> bool:
    bounds = [value for node in one if (value := _number(node, least)) is not None]
    limits = [value for node in other if (value := _number(node, most)) is not None]
    return bool(bounds) and bool(limits) and max(bounds) > min(limits)


def _number(node: Schema, keyword: str) -> float | None:
    value = node.get(keyword)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _required(conjuncts: Sequence[Schema]) -> Iterator[str]:
    for conjunct in conjuncts:
        names = conjunct.get("required")
        if isinstance(names, list):
            yield from (name for name in names if isinstance(name, str))


def _property_schemas(conjuncts: Sequence[Schema], name: str) -> Iterator[object]:
    """What each conjunct says about property `name`."""
    for conjunct in conjuncts:
        properties = conjunct.get("properties")
        if is_schema(properties) and name in properties:
            yield properties[name]
        elif "patternProperties" not in conjunct and "additionalProperties" in conjunct:
            yield conjunct["additionalProperties"]

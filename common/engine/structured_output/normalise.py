"""The same language in fewer keywords: what a grammar library need not know is rewritten before it sees the schema.

Owns: the rewriting rules; each keeps the set of valid values exactly (`additional_properties` off is the one exception,
and it is asked for). Pure. A keyword no rule applies to stays as it is, and whoever cannot enforce it refuses it.
"""

from collections.abc import Sequence

from common.engine.structured_output.complement import Complementer, all_but, union
from common.engine.structured_output.disjoint import DisjointProver
from common.engine.structured_output.json_schema import Schema, is_schema, rebuild, walk

KNOWN_FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"}
)
"""Formats that are enforced. Any other is an annotation, as JSON schema has it by default."""

_MAX_UNION = 32
"""Most members of a union that a rule may make."""

OLD_DRAFTS = ("draft-03", "draft-04", "draft-06", "draft-07")
_DRAFTS = (*OLD_DRAFTS, "2019-09", "2020-12")


def draft_of(schema: Schema) -> str | None:
    """The draft a schema names in `$schema`; None when it names none we know (then it is read as 2020-12)."""
    named = schema.get("$schema")
    return next((draft for draft in _DRAFTS if isinstance(named, str) and draft in named), None)


def normalise(schema: Schema, *, additional_properties: bool = True) -> object:
    """An equivalent schema.

    Args:
        schema: the root, a JSON object; not changed.
        additional_properties: False closes every object that declares properties and says nothing about others.

    Returns:
        A schema or a boolean.
    """
    rules = _Rules(schema, additional_properties=additional_properties)
    return rebuild(schema, rules.rewrite)


class _Rules:
    def __init__(self, root: Schema, *, additional_properties: bool) -> None:
        self._additional_properties = additional_properties
        self._keeps_places = _has_deep_references(root)
        self._is_old = draft_of(root) in OLD_DRAFTS
        self._is_named = draft_of(root) is not None
        self._complementer = Complementer(root)
        self._prover = DisjointProver(root)

    def rewrite(self, node: Schema) -> object:
        """One object schema; its sub-schemas are rewritten already."""
        if self._is_old and "$ref" in node:
            _keep_only_reference(node)
        if "$schema" in node and not self._is_named:
            del node["$schema"]
        _drop_vacuous(node)
        if not _filter_listed(node):
            return False
        self._close(node)
        if self._keeps_places:
            return node
        self._rewrite_dependencies(node)
        self._rewrite_conditional(node)
        self._rewrite_not(node)
        self._rewrite_one_of(node)
        self._rewrite_least_properties(node)
        return node

    def _close(self, node: Schema) -> None:
        """`disable_additional_properties`."""
        if self._additional_properties or "additionalProperties" in node:
            return
        if "properties" in node or "patternProperties" in node:
            node["additionalProperties"] = False

    def _rewrite_dependencies(self, node: Schema) -> None:
        """If the property is there, more holds: it is absent, or more holds."""
        for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
            rules = node.pop(keyword, None)
            if not is_schema(rules):
                continue
            for name, consequence in rules.items():
                holds = {"required": consequence} if isinstance(consequence, list) else consequence
                if holds not in (True, {}, {"required": []}):
                    _require(node, {"anyOf": [{"properties": {name: False}}, holds]})

    def _rewrite_conditional(self, node: Schema) -> None:
        if "if" not in node:
            node.pop("then", None)
            node.pop("else", None)
            return
        condition, then, otherwise = node["if"], node.get("then", True), node.get("else", True)
        opposite = self._complementer.complement(condition)
        if opposite is None:
            return
        for keyword in ("if", "then", "else"):
            node.pop(keyword, None)
        when = [_both(condition, then), _both(opposite, otherwise)]
        _require(node, union(when))

    def _rewrite_not(self, node: Schema) -> None:
        if "not" not in node:
            return
        opposite = self._complementer.complement(node["not"])
        if opposite is not None:
            del node["not"]
            _require(node, opposite)

    def _rewrite_one_of(self, node: Schema) -> None:
        """Exactly one holds: one holds, and none of those it is not proven to exclude."""
        members = node.get("oneOf")
        if not isinstance(members, list):
            return
        alone = [self._alone(index, members) for index in range(len(members))]
        if any(member is None for member in alone):
            return
        del node["oneOf"]
        if "anyOf" in node:
            _require(node, union(alone))
        else:
            node["anyOf"] = [member for member in alone if member is not False] or [False]

    def _alone(self, index: int, members: Sequence[object]) -> object:
        """Member `index` where no other member holds; None when that cannot be said."""
        member: object = members[index]
        for place, other in enumerate(members):
            if place != index and not self._prover.disjoint(members[index], other):
                opposite = self._complementer.complement(other)
                if opposite is None:
                    return None
                member = _both(member, opposite)
        return member

    def _rewrite_least_properties(self, node: Schema) -> None:
        """One property at least: one of the declared, or none of them and another one."""
        declared = node.get("properties")
        if node.get("minProperties") != 1 or not is_schema(declared) or not 0 < len(declared) <= _MAX_UNION:
            return
        del node["minProperties"]
        if set(_names(node.get("required"))):
            return
        ways: list[object] = [{"required": [name]} for name in declared]
        if node.get("additionalProperties") is not False or node.get("patternProperties"):
            ways.append({"properties": dict.fromkeys(declared, False), "minProperties": 1})
        if node.get("type") != "object":
            ways.extend(all_but(["object"]))
        _require(node, {"anyOf": ways})


def _names(required: object) -> Sequence[str]:
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []


def _has_deep_references(root: Schema) -> bool:
    """Whether a reference points below a definition: then nothing may move."""
    for _, node in walk(root):
        reference = node.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/"):
            parts = reference[2:].split("/")
            if len(parts) != 2 or parts[0] not in ("$defs", "definitions"):
                return True
    return False


def _keep_only_reference(node: Schema) -> None:
    """Up to draft 7, what stands beside `$ref` means nothing."""
    for keyword in list(node):
        if keyword not in ("$ref", "$defs", "definitions", "$schema", "$id", "id"):
            del node[keyword]


def _drop_vacuous(node: Schema) -> None:
    """Keywords that forbid nothing here."""
    if "format" in node and node["format"] not in KNOWN_FORMATS:
        del node["format"]
    if node.get("uniqueItems") is False or _holds_at_most_one(node):
        node.pop("uniqueItems", None)
    for keyword in ("minItems", "minLength", "minProperties"):
        if node.get(keyword) == 0 and not isinstance(node[keyword], bool):
            del node[keyword]


def _filter_listed(node: Schema) -> bool:
    """Keep the listed values that `type` allows, and drop `type`; False when none is left."""
    declared = node.get("type")
    names = [declared] if isinstance(declared, str) else declared
    values = node.get("enum", [node["const"]] if "const" in node else None)
    if not isinstance(names, list) or not isinstance(values, list) or ("enum" in node and "const" in node):
        return True
    kept = [value for value in values if _json_types(value) & set(names)]
    del node["type"]
    if "enum" in node:
        node["enum"] = kept
    return bool(kept)


def _json_types(value: object) -> set[str]:
    if isinstance(value, float) and value.is_integer():
        return {"number", "integer"}
    return _TYPES_OF.get(type(value), {"null"})


_TYPES_OF: dict[type, set[str]] = {
    bool: {"boolean"},
    int: {"number", "integer"},
    float: {"number"},
    str: {"string"},
    list: {"array"},
    dict: {"object"},
}


def _holds_at_most_one(node: Schema) -> bool:
    most = node.get("maxItems")
    return isinstance(most, int) and most <= 1


def _both(one: object, other: object) -> object:
    if one is True or one == {}:
        return other
    if other is True or other == {}:
        return one
    if one is False or other is False:
        return False
    return {"allOf": [one, other]}


def _require(node: Schema, condition: object) -> None:
    """Add a condition to a node, in place."""
    if condition is True:
        return
    present = node.get("allOf")
    node["allOf"] = [*(present if isinstance(present, list) else []), condition]

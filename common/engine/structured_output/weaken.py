"""The nearest superset of a JSON schema that grammars can follow, for `on_inexact: validate`.

Owns: which keywords are left out, and their names, so that an answer can say what was only checked afterwards. Pure.
Does not know backends, or the check itself (`final_check`).
"""

from common.engine.structured_output.json_schema import Schema, rebuild

_LEFT_OUT = frozenset(
    {
        "$dynamicRef",
        "$recursiveRef",
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "maxProperties",
        "minContains",
        "minProperties",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
)


def weaken(schema: Schema) -> tuple[object, tuple[str, ...]]:
    """A schema that allows all that `schema` allows, and the keywords it does not keep.

    Each of them only ever forbids, so that leaving it out can only allow more; `oneOf` becomes `anyOf`.
    """
    left_out: set[str] = set()

    def loosen(node: Schema) -> object:
        """`node` without what only forbids; notes what that was."""
        for keyword in _LEFT_OUT & node.keys():
            left_out.add(keyword)
            del node[keyword]
        if "oneOf" in node:
            left_out.add("oneOf")
            members = node.pop("oneOf")
            present = node.get("allOf")
            node["allOf"] = [*(present if isinstance(present, list) else []), {"anyOf": members}]
        return node

    return rebuild(schema, loosen), tuple(sorted(left_out))

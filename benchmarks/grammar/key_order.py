"""The order in which properties are generated: the schema's.

Owns: putting an instance's keys into it. Pure.
"""

from common.engine.structured_output.json_schema import resolve


def in_schema_order(instance: object, node: object, root: dict[str, object] | None = None) -> object:
    """`instance` with its keys in the order the schema declares them; undeclared ones stay behind the declared.

    Args:
        instance: JSON.
        node: its schema.
        root: where references start; `node` when None.
    """
    if not isinstance(node, dict):
        return instance
    root = root if root is not None else node
    while isinstance(node, dict) and isinstance(node.get("$ref"), str):
        node = resolve(root, node["$ref"])
    if not isinstance(node, dict):
        return instance
    if isinstance(instance, list):
        return [in_schema_order(item, node.get("items"), root) for item in instance]
    if not isinstance(instance, dict):
        return instance
    properties = node.get("properties", {})
    keys = [key for key in properties if key in instance] + [key for key in instance if key not in properties]
    return {key: in_schema_order(instance[key], properties.get(key), root) for key in keys}

"""What each backend would not enforce exactly in a JSON schema, by name.

Owns: one table per backend, checked against `jsonschema` in the tests. Pure. Exact: whatever the masks allow is valid.
A library that refuses by itself needs no entry here; these are the keywords it would take and then not keep.
"""

import re
from collections.abc import Callable, Iterator, Mapping

from common.engine.structured_output.json_schema import Schema, is_schema, meaning, reachable, resolve
from common.engine.structured_output.normalise import OLD_DRAFTS, draft_of

Gap = str
"""One sentence: which keyword, where, why."""

_ESCAPES = re.compile(r"\\.", re.DOTALL)
_CLASSES = re.compile(r"\[\^?\]?[^\]]*\]")
_PLAIN = re.compile(r"[ !#-\[\]-~]*")
Shapes = tuple[frozenset[str], ...]
_OBJECT_KEYS = frozenset({"type", "properties", "required", "additionalProperties"})
_XGRAMMAR_SHAPES: Shapes = (
    frozenset({"$ref"}),
    frozenset({"anyOf"}),
    frozenset({"const"}),
    frozenset({"enum"}),
    frozenset({"type", "minLength", "maxLength"}),
    frozenset({"type", "pattern"}),
    frozenset({"type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    frozenset({"type", "items", "minItems", "maxItems"}),
    frozenset({"type", "prefixItems", "items"}),
    _OBJECT_KEYS,
)
"""Sets of keywords that xgrammar 0.2.9 keeps when a node has no others. Beside each other it drops some (`pattern` and
`maxLength`), and what it cannot say (`not`, overlapping `oneOf`, `multipleOf`) it leaves out with a line on stderr."""


_OUTLINES_SHAPES: Shapes = (
    frozenset({"anyOf"}),
    frozenset({"const"}),
    frozenset({"enum"}),
    frozenset({"type", "minLength", "maxLength"}),
    frozenset({"type", "items", "minItems", "maxItems"}),
    _OBJECT_KEYS,
)
_ENFORCER_SHAPES: Shapes = (
    frozenset({"$ref"}),
    frozenset({"anyOf"}),
    frozenset({"enum"}),
    _OBJECT_KEYS,
)
"""Without lengths and without arrays: 0.11 loses the closing quote of a bounded string in an array, and what stands
behind `false` in one."""


def gaps(backend: str, schema: Schema) -> tuple[Gap, ...]:
    """Why `backend` must not get `schema`; empty when it keeps all of it or refuses by itself."""
    table = _TABLES.get(backend, _no_gaps)
    return tuple(f"{reason} (at {path})" for path, node in reachable(schema) for reason in table(node, schema))


def _no_gaps(node: Schema, root: Schema) -> Iterator[Gap]:
    del node, root
    yield from ()


def _guidance_gaps(node: Schema, root: Schema) -> Iterator[Gap]:
    """Nearly everything else llguidance 1.9 does not keep it refuses by itself."""
    if isinstance(node.get("items"), list) and draft_of(root) not in (*OLD_DRAFTS, "2019-09"):
        yield "a list of `items` is the older drafts' form: write `prefixItems`, or name the draft in `$schema`"
    least = node.get("minProperties")
    if isinstance(least, int) and least > _num_required(node) + 1 and _is_open(node):
        yield "`minProperties` beside undeclared properties: one key written twice would count twice"


def _xgrammar_gaps(node: Schema, root: Schema) -> Iterator[Gap]:
    """xgrammar: only nodes of the shapes above."""
    yield from _reference_gaps(node, root, "xgrammar")
    pattern = node.get("pattern")
    if isinstance(pattern, str) and has_inner_anchor(pattern):
        yield "an anchor inside `pattern` is ignored by xgrammar"
    keywords = meaning(node)
    if not keywords:
        return
    if not any(keywords <= shape for shape in _XGRAMMAR_SHAPES):
        yield f"{_names(keywords)} in one schema cannot be relied on with xgrammar"
    elif keywords <= _OBJECT_KEYS and ("properties" in node or "required" in node):
        declared = node.get("properties")
        names = declared if is_schema(declared) else {}
        required = node.get("required")
        if node.get("additionalProperties") is not False:
            yield "declared beside undeclared properties: xgrammar may repeat a declared key with another value"
        if isinstance(required, list) and not all(name in names for name in required):
            yield "`required` names an undeclared property"
    if "pattern" in keywords and "type" not in keywords:
        yield "`pattern` without `type`"


def _outlines_gaps(node: Schema, root: Schema) -> Iterator[Gap]:
    """outlines-core leaves out what it does not know without a word, and cannot recurse."""
    del root
    yield from _shape_gaps(node, _OUTLINES_SHAPES, "outlines")
    yield from _spelling_gaps(node, "outlines")
    if "$ref" in node:
        yield "`$ref` cannot be relied on with outlines"
    if "properties" in node and node.get("additionalProperties") is not False:
        yield "declared beside undeclared properties"


def _enforcer_gaps(node: Schema, root: Schema) -> Iterator[Gap]:
    """So does lm-format-enforcer; it also forgets escapes."""
    yield from _reference_gaps(node, root, "lm-format-enforcer")
    yield from _shape_gaps(node, _ENFORCER_SHAPES, "lm-format-enforcer")
    yield from _spelling_gaps(node, "lm-format-enforcer")
    listed = node.get("enum")
    if node.get("type") == "integer":
        yield "`integer`: lm-format-enforcer lets it have a negative exponent"
    if node.get("maxItems") == 0 or node.get("enum") == [] or "" in (listed if isinstance(listed, list) else []):
        yield "`maxItems: 0` and empty strings are not kept by lm-format-enforcer"
    names = node.get("properties")
    required = node.get("required")
    if is_schema(names) and set(names) - set(required if isinstance(required, list) else []):
        yield "an optional property: lm-format-enforcer may leave its comma behind"
    if "properties" in node and node.get("additionalProperties") is not False:
        yield "declared beside undeclared properties"


def _reference_gaps(node: Schema, root: Schema, library: str) -> Iterator[Gap]:
    reference = node.get("$ref")
    if reference is not None and not is_schema(resolve(root, str(reference))):
        shown = str(reference)[:80]
        yield f"`$ref` to {shown!r}, which is not a schema in this text, cannot be relied on with {library}"


def has_inner_anchor(pattern: str) -> bool:
    """Whether `^` or `$` stands anywhere but at the ends, outside escapes and character classes."""
    bare = _CLASSES.sub("", _ESCAPES.sub("", pattern)).removeprefix("^").removesuffix("$")
    return "^" in bare or "$" in bare


def _spelling_gaps(node: Schema, library: str) -> Iterator[Gap]:
    """Names and listed values that would need escapes, or more than one byte per character."""
    names = node.get("properties")
    listed = node.get("enum")
    texts = [*(names if is_schema(names) else []), *(listed if isinstance(listed, list) else []), node.get("const", "")]
    if not all(isinstance(text, str) and _PLAIN.fullmatch(text) for text in texts):
        yield f"names and listed values must be plain ASCII strings for {library}"


def _shape_gaps(node: Schema, shapes: Shapes, library: str) -> Iterator[Gap]:
    keywords = meaning(node)
    if not any(keywords <= shape for shape in shapes):
        yield f"{_names(keywords)} in one schema cannot be relied on with {library}"


def _num_required(node: Schema) -> int:
    required = node.get("required")
    return len(required) if isinstance(required, list) else 0


def _is_open(node: Schema) -> bool:
    return node.get("additionalProperties") is not False or bool(node.get("patternProperties"))


def _names(keywords: frozenset[str]) -> str:
    return ", ".join(f"`{keyword}`" for keyword in sorted(keywords))


_TABLES: Mapping[str, Callable[[Schema, Schema], Iterator[Gap]]] = {
    "guidance": _guidance_gaps,
    "xgrammar": _xgrammar_gaps,
    "outlines": _outlines_gaps,
    "lm-format-enforcer": _enforcer_gaps,
}

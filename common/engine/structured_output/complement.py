"""The complement of a JSON schema, where another schema can say it exactly.

Owns: the rule per keyword, so that `not`, `if` and `dependentRequired` become unions that grammars can follow. Pure.
Does not know backends. A keyword without a rule has no complement: the answer is None, never an approximation.
"""

from collections.abc import Callable, Mapping, Sequence

from common.engine.structured_output.json_schema import ANNOTATIONS, Schema, is_schema, resolve

_TYPES = ("null", "boolean", "object", "array", "number", "string")
_HOLDERS = frozenset({"$defs", "definitions"})
_MAX_DEPTH = 12
_MAX_EXCLUDED_CHARACTERS = 4096


class Complementer:
    """Complements of schemas below one root.

    Args:
        root: what local references start from.
    """

    def __init__(self, root: Schema) -> None:
        self._root = root

    def complement(self, schema: object, depth: int = 0) -> Schema | bool | None:
        """A schema valid for exactly the values that `schema` is not valid for; None: there is no exact one."""
        if isinstance(schema, bool):
            return not schema
        if not is_schema(schema) or depth > _MAX_DEPTH:
            return None
        parts: list[object] = []
        for keyword, value in schema.items():
            if keyword in ANNOTATIONS or keyword in _HOLDERS:
                continue
            found = self._of_keyword(keyword, value, depth)
            if found is None:
                return None
            parts.extend(found)
        return union(parts)

    def _of_keyword(self, keyword: str, value: object, depth: int) -> Sequence[object] | None:
        """The alternatives that violate `keyword: value`; None without a rule."""
        if keyword in _SCALAR_RULES:
            return _SCALAR_RULES[keyword](value)
        if keyword == "properties" and is_schema(value):
            return self._of_properties(value, depth)
        if keyword in ("allOf", "anyOf") and isinstance(value, list):
            complements = [self.complement(member, depth + 1) for member in value]
            if any(member is None for member in complements):
                return None
            return complements if keyword == "allOf" else [{"allOf": complements}]
        if keyword == "not":
            return [value]
        if keyword == "$ref" and isinstance(value, str):
            target = self.complement(resolve(self._root, value), depth + 1)
            return None if target is None else [target]
        return None

    def _of_properties(self, properties: Schema, depth: int) -> Sequence[object] | None:
        parts: list[object] = []
        for name, schema in properties.items():
            inner = self.complement(schema, depth + 1)
            if inner is None:
                return None
            if inner is not False:
                parts.append({"type": "object", "properties": {name: inner}, "required": [name]})
        return parts


def union(parts: Sequence[object]) -> Schema | bool:
    """A schema for "one of `parts`"; False for none."""
    possible = [part for part in parts if part is not False]
    if any(part is True or part == {} for part in possible):
        return True
    if len(possible) == 1 and is_schema(possible[0]):
        return possible[0]
    return {"anyOf": possible} if possible else False


def all_but(names: Sequence[str]) -> list[object]:
    """One alternative: every type but `names`; empty when none is left."""
    left = [name for name in _TYPES if name not in names]
    return [{"type": left}] if left else []


def strings_except(texts: Sequence[str]) -> str:
    r"""A regex, anchored, of every string but `texts`.

    Built along their trie: leave it at a character no text has there, or stop where none ends.

        except "ab":  ""  |  [^a]...  |  a  |  a[^b]...  |  ab(one more)...
    """
    return f"^{_outside(sorted(set(texts)))}$"


def _outside(texts: Sequence[str]) -> str:
    branches: dict[str, list[str]] = {}
    for text in texts:
        if text:
            branches.setdefault(text[0], []).append(text[1:])
    alternatives = [] if "" in texts else [""]
    first = "".join(_escaped(character) for character in branches)
    alternatives.append(f"[^{first}][\\s\\S]*" if first else "[\\s\\S]+")
    alternatives += [_escaped(character) + _outside(rest) for character, rest in branches.items()]
    return f"(?:{'|'.join(alternatives)})"


def _escaped(character: str) -> str:
    """One character as every regex dialect reads it."""
    code = ord(character)
    if character.isascii() and character.isalnum():
        return character
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _of_type(value: object) -> Sequence[object] | None:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return None
    if "integer" in names and "number" not in names:
        return None
    return all_but(names)


def _of_enum(value: object) -> Sequence[object] | None:
    if not isinstance(value, list) or not all(isinstance(item, str | bool) or item is None for item in value):
        return None
    texts = [item for item in value if isinstance(item, str)]
    if sum(map(len, texts)) > _MAX_EXCLUDED_CHARACTERS or any("\ud800" <= c <= "\udfff" for t in texts for c in t):
        return None
    touched = ["string"] * bool(texts) + ["null"] * (None in value)
    flags = [item for item in value if isinstance(item, bool)]
    parts = all_but(touched + ["boolean"] * bool(flags))
    if texts:
        parts.append({"type": "string", "pattern": strings_except(texts)})
    if flags:
        parts += [{"enum": [flag]} for flag in (False, True) if flag not in flags]
    return parts


def _of_required(value: object) -> Sequence[object] | None:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        return None
    return [{"type": "object", "properties": {name: False}} for name in value]


def _of_least(keyword: str, type_name: str) -> Callable[[object], Sequence[object] | None]:
    def rule(value: object) -> Sequence[object] | None:
        """What has less than `value` of it; nothing has where `value` is 0."""
        if not isinstance(value, int) or isinstance(value, bool):
            return None
        return [{"type": type_name, keyword: value - 1}] if value > 0 else []

    return rule


def _of_most(keyword: str, type_name: str) -> Callable[[object], Sequence[object] | None]:
    def rule(value: object) -> Sequence[object] | None:
        """What has more than `value` of it."""
        if not isinstance(value, int) or isinstance(value, bool):
            return None
        return [{"type": type_name, keyword: value + 1}]

    return rule


def _of_bound(keyword: str) -> Callable[[object], Sequence[object] | None]:
    def rule(value: object) -> Sequence[object] | None:
        """Numbers on the other side of `value`."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None  # draft 4 writes exclusiveMinimum as a boolean
        return [{"type": "number", keyword: value}]

    return rule


_SCALAR_RULES: Mapping[str, Callable[[object], Sequence[object] | None]] = {
    "type": _of_type,
    "enum": _of_enum,
    "const": lambda value: _of_enum([value]),
    "required": _of_required,
    "minLength": _of_least("maxLength", "string"),
    "maxLength": _of_most("minLength", "string"),
    "minItems": _of_least("maxItems", "array"),
    "maxItems": _of_most("minItems", "array"),
    "minimum": _of_bound("exclusiveMaximum"),
    "maximum": _of_bound("exclusiveMinimum"),
    "exclusiveMinimum": _of_bound("maximum"),
    "exclusiveMaximum": _of_bound("minimum"),
}

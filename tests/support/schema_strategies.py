"""Random JSON schemas out of keywords that are enforced exactly, for walks through their grammars."""

from typing import Any

from hypothesis import strategies as st

NAMES = st.sampled_from(["a", "b", 'key with "quote"', "\u00e9"])
WORDS = st.sampled_from(["", "x", "yes", 'q"', "\u4f60", "tab\t"])


def _bounds(low: str, high: str, most: int) -> st.SearchStrategy[dict[str, Any]]:
    pairs = st.tuples(st.integers(0, most), st.integers(0, most)).map(sorted)
    return pairs.flatmap(
        lambda pair: st.sampled_from([{}, {low: pair[0]}, {high: pair[1]}, {low: pair[0], high: pair[1]}])
    )


def _leaves() -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        st.sampled_from(
            [{"type": "boolean"}, {"type": "null"}, {"type": "number"}, {"const": 3}, {"const": {"a": []}}]
        ),
        _bounds("minLength", "maxLength", 4).map(lambda bounds: {"type": "string", **bounds}),
        _bounds("minimum", "maximum", 40).map(lambda bounds: {"type": "integer", **bounds}),
        st.lists(WORDS, min_size=1, max_size=3, unique=True).map(lambda words: {"enum": words}),
        st.sampled_from(["^[a-c]+$", "b", "^x{2,4}y?$", "[0-9]{2}"]).map(
            lambda text: {"type": "string", "pattern": text}
        ),
        st.sampled_from(["date", "email", "ipv4", "uuid"]).map(lambda name: {"type": "string", "format": name}),
    )


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    properties = draw(st.dictionaries(NAMES, inner, max_size=3))
    required = [name for name in properties if draw(st.booleans())]
    node: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    closed = draw(st.sampled_from([True, False, None]))
    if closed is not None:
        node["additionalProperties"] = not closed
    if len(properties) > 1 and draw(st.booleans()):
        first, second = list(properties)[:2]
        node["dependentRequired"] = {first: [second]}
    return node


def _grow(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        _objects(inner),
        st.tuples(inner, _bounds("minItems", "maxItems", 3)).map(
            lambda pair: {"type": "array", "items": pair[0], **pair[1]}
        ),
        st.lists(inner, min_size=1, max_size=2).map(lambda members: {"anyOf": members}),
        st.lists(inner, min_size=2, max_size=2).map(lambda members: {"oneOf": members}),
        st.lists(inner, min_size=1, max_size=2).map(
            lambda items: {"type": "array", "prefixItems": items, "items": False}
        ),
        st.lists(WORDS, min_size=1, max_size=2, unique=True).map(
            lambda words: {"type": "string", "not": {"enum": words}}
        ),
    )


SCHEMAS = st.recursive(_leaves(), _grow, max_leaves=5)
"""Schemas with few leaves; some have no instance, some are refused."""

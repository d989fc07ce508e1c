"""A structured-output constraint in canonical form: what caches, matchers and labels key on.

Owns: the type. Parsing it out of OpenAI/vLLM body fields: `common.openai.constraint`.
Does not know: grammar libraries.
"""

from enum import Enum

import msgspec


class ConstraintKind(Enum):
    """What the value is written in."""

    JSON_SCHEMA = "json"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """One constraint. Hashable; equal constraints compile to the same language.

    Attributes:
        kind: how to read `value`.
        value: the schema as JSON text with its key order kept (order is meaning: properties are generated in it), a
            regex, EBNF or Lark text, the choices as a JSON array, a structural tag as JSON; empty for JSON_OBJECT.
        any_whitespace: whether JSON may hold whitespace between tokens (vLLM: not `disable_any_whitespace`).
        additional_properties: what an object schema that says nothing about it allows.
        whitespace_pattern: regex of the whitespace between JSON tokens; None is the backend's own.
        from_tool: whether a forced tool call made this constraint (labels only).
        field: the body field it came from, for error messages.
    """

    kind: ConstraintKind
    value: str
    any_whitespace: bool = True
    additional_properties: bool = True
    whitespace_pattern: str | None = None
    from_tool: bool = False
    field: str = "structured_outputs"

    @property
    def label(self) -> str:
        """Metric label of its kind; DESIGN §7."""
        if self.from_tool:
            return "tool"
        return "json" if self.kind is ConstraintKind.JSON_OBJECT else self.kind.value

    @property
    def key(self) -> tuple[str, str, bool, bool, str | None]:
        """What a compiled grammar depends on, beside tokenizer and backend."""
        return self.kind.value, self.value, self.any_whitespace, self.additional_properties, self.whitespace_pattern

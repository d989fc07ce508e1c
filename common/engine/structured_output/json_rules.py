"""The language rules of generated JSON that every backend keeps, so that changing backend never changes the language.

Owns: whitespace between tokens and its cap. Property order is the schema's; `additionalProperties` is JSON schema's own
default unless the request turns it off. Does not know any backend.
"""

MAX_WHITESPACE = 32
"""Most whitespace characters between two JSON tokens: room for indentation, an end to runaway blanks."""

DEFAULT_WHITESPACE = rf"[ \n\t]{{0,{MAX_WHITESPACE}}}"
"""Regex of whitespace between tokens when the request names none. None before the first token or after the last."""

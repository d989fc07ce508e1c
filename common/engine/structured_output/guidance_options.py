"""The language rules of JSON in llguidance's options: whitespace and its cap, escapes, nothing lenient.

Owns: the mapping from a constraint's options. Imports no library, so that planning needs none.
"""

from common.engine.structured_output.json_rules import DEFAULT_WHITESPACE
from common.wire.constraint import Constraint

_JSON_ESCAPES = '"\\bfnrt'
"""Escapes a generated string may hold. Not `u`: a key spelled with it would slip past `properties`, and one character
spelled as a surrogate pair would count twice for `minLength`."""


def json_options(constraint: Constraint) -> dict[str, object]:
    """Options of llguidance for JSON under `constraint`'s rules."""
    options: dict[str, object] = {
        "item_separator": ",",
        "key_separator": ":",
        "json_allowed_escapes": _JSON_ESCAPES,
        "json_allow_general_unicode_escapes": False,
        "lenient": False,
        "coerce_one_of": False,
    }
    if constraint.whitespace_pattern is not None:
        options["whitespace_pattern"] = constraint.whitespace_pattern
    elif constraint.any_whitespace:
        options["whitespace_pattern"] = DEFAULT_WHITESPACE
    else:
        options["whitespace_flexible"] = False
    return options

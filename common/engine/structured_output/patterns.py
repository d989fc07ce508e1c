"""Choices as a regex that every dialect reads alike.

Owns: escaping. Pure.
"""

import json
import re

_PLAIN = re.compile(r"[^A-Za-z0-9_\u0080-\U0010ffff]")


def choice_pattern(choices: str) -> str:
    """A regex that matches exactly the members of a JSON array of strings, longest first."""
    members = sorted(json.loads(choices), key=len, reverse=True)
    return f"({'|'.join(map(literal_pattern, members))})"


def literal_pattern(text: str) -> str:
    """A regex that matches only `text`."""
    return _PLAIN.sub(lambda match: f"\\x{ord(match.group()):02x}", text)

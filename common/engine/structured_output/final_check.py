"""Check a finished text against its whole schema, for what the masks did not enforce.

Owns: the only import of `jsonschema`, made when first needed: only `on_inexact: validate` needs it to be installed.
Does not know: grammars, requests.
"""

import json

from common.errors import ConfigError


def require_checker() -> None:
    """Raise `ConfigError` when `jsonschema` is not installed."""
    try:
        import jsonschema  # noqa: F401 only whether it is there
    except ImportError as error:
        raise ConfigError("grammar.on_inexact: validate needs the package jsonschema") from error


def why_invalid(schema_text: str, text: str) -> str | None:
    """None when `text` is JSON and valid; otherwise what is wrong, in one line.

    Args:
        schema_text: the schema as it was asked for, not a superset.
        text: the finished output.
    """
    import jsonschema
    import jsonschema.validators

    try:
        instance = json.loads(text)
    except ValueError as error:
        return f"not JSON: {error}"
    schema = json.loads(schema_text)
    validator_class = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        worst = jsonschema.exceptions.best_match(validator_class(schema).iter_errors(instance))
    except Exception as failure:  # noqa: BLE001 an unresolvable reference or a broken pattern: not shown to be valid
        return f"cannot be checked: {failure}"
    return None if worst is None else " ".join(worst.message.split())[:400]

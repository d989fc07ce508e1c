"""The secret that engines share: read from a file or an environment variable, never written in the config itself.

Owns: the only reading of such values. Does not know: what they sign.
"""

import os
from pathlib import Path

from common.errors import ConfigError

MIN_BYTES = 16


def read_secret(file: str | None, variable: str | None) -> bytes | None:
    """The secret without surrounding white space; None when neither place is configured.

    Args:
        file: path of a file that holds it.
        variable: name of an environment variable that holds it.

    Raises:
        ConfigError: both are configured, or the named place is missing, empty or too short to be a secret.
    """
    if file is not None and variable is not None:
        raise ConfigError("`secret_file` and `secret_variable` exclude each other")
    if file is not None:
        return _checked(_from_file(file), f"secret_file {file}")
    if variable is not None:
        value = os.environ.get(variable)  # noqa: TID251 - the one place where a secret may come from the environment
        if value is None:
            raise ConfigError(f"secret_variable {variable}: not set in the environment")
        return _checked(value.encode(), f"secret_variable {variable}")
    return None


def _from_file(file: str) -> bytes:
    try:
        return Path(file).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"secret_file {file}: {error.strerror}") from error


def _checked(value: bytes, place: str) -> bytes:
    secret = value.strip()
    if len(secret) < MIN_BYTES:
        raise ConfigError(f"{place}: a secret has at least {MIN_BYTES} bytes, this has {len(secret)}")
    return secret

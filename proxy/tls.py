"""TLS contexts from the config.

Owns: which files make which context, and one clear line when they do not. Does not know: sockets.
"""

import ssl

from common.errors import ConfigError
from proxy.config import EngineTlsConfig, TlsConfig


def server_context(config: TlsConfig) -> ssl.SSLContext | None:
    """For clients; None serves plain HTTP.

    Raises:
        ConfigError: a file is missing or makes no sense.
    """
    if config.cert_file is None:
        if config.key_file is not None or config.client_ca_file is not None:
            raise ConfigError("key `proxy.tls.cert_file` is missing beside the other keys of `proxy.tls`")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    _load(context, config.cert_file, config.key_file, "proxy.tls")
    if config.client_ca_file is not None:
        _trust(context, config.client_ca_file, "proxy.tls.client_ca_file")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def engine_context(config: EngineTlsConfig) -> ssl.SSLContext:
    """For engines behind https.

    Raises:
        ConfigError: a file is missing or makes no sense.
    """
    context = ssl.create_default_context()
    if config.ca_file is not None:
        _trust(context, config.ca_file, "proxy.engine_tls.ca_file")
    if config.cert_file is not None:
        _load(context, config.cert_file, config.key_file, "proxy.engine_tls")
    return context


def _load(context: ssl.SSLContext, cert_file: str, key_file: str | None, name: str) -> None:
    try:
        context.load_cert_chain(cert_file, key_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"key `{name}.cert_file`: {cert_file} and its key cannot be used: {error}") from error


def _trust(context: ssl.SSLContext, ca_file: str, name: str) -> None:
    try:
        context.load_verify_locations(ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"key `{name}`: {ca_file} cannot be used: {error}") from error

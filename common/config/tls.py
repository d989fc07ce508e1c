"""TLS as the config file names it: which files make which context, and one clear line when they do not.

Owns: the keys of both sides of a connection, for every role. Does not know: sockets.
"""

import ssl
from pathlib import Path

import msgspec

from common.errors import ConfigError


class TlsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """HTTPS towards clients.

    Attributes:
        cert_file: certificate chain, PEM; null serves plain HTTP.
        key_file: its private key, PEM.
        client_ca_file: clients must show a certificate signed by these; null asks for none.
    """

    cert_file: str | None = None
    key_file: str | None = None
    client_ca_file: str | None = None


class PeerTlsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """HTTPS towards engines.

    Attributes:
        ca_file: certificates that sign the engines'; null trusts the machine's.
        cert_file: one's own certificate, PEM, for engines that ask.
        key_file: its private key, PEM.
    """

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None


def server_context(config: TlsConfig, name: str, folder: Path | None = None) -> ssl.SSLContext | None:
    """For clients; None serves plain HTTP.

    Args:
        config: the files.
        name: of the section, for what is wrong.
        folder: where relative names start; None takes them as they are.

    Raises:
        ConfigError: a file is missing or makes no sense.
    """
    if config.cert_file is None:
        if config.key_file is not None or config.client_ca_file is not None:
            raise ConfigError(f"key `{name}.cert_file` is missing beside the other keys of `{name}`")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    _load(context, config.cert_file, config.key_file, name, folder)
    if config.client_ca_file is not None:
        _trust(context, config.client_ca_file, f"{name}.client_ca_file", folder)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(config: PeerTlsConfig, name: str, folder: Path | None = None) -> ssl.SSLContext:
    """For engines behind https; arguments as of `server_context`.

    Raises:
        ConfigError: a file is missing or makes no sense.
    """
    context = ssl.create_default_context()
    if config.ca_file is not None:
        _trust(context, config.ca_file, f"{name}.ca_file", folder)
    if config.cert_file is not None:
        _load(context, config.cert_file, config.key_file, name, folder)
    return context


def _load(context: ssl.SSLContext, cert_file: str, key_file: str | None, name: str, folder: Path | None) -> None:
    try:
        context.load_cert_chain(_within(folder, cert_file), None if key_file is None else _within(folder, key_file))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"key `{name}.cert_file`: {cert_file} and its key cannot be used: {error}") from error


def _trust(context: ssl.SSLContext, ca_file: str, name: str, folder: Path | None) -> None:
    try:
        context.load_verify_locations(_within(folder, ca_file))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"key `{name}`: {ca_file} cannot be used: {error}") from error


def _within(folder: Path | None, file: str) -> Path:
    return Path(file) if folder is None else folder / file

"""`pd-decode --config FILE`: the command line of D.

Owns: what must hold of D's settings beyond their types. Building D: `decode.role`.
"""

import ssl
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config.engine import EngineConfig
from common.config.loader import load_section, role_engine_config
from common.config.secret import read_secret
from common.config.tls import client_context, server_context
from common.errors import ConfigError
from common.serving.program import run
from decode.config import DecodeConfig
from kv_transfer.compatibility import check_buffer_device
from kv_transfer.reference import is_loopback


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything the config file says about D."""

    config: DecodeConfig
    engine: EngineConfig
    secret: bytes | None
    tls: ssl.SSLContext | None
    prefill_tls: ssl.SSLContext | None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    return run("pd-decode", argv, read, serve)


def read(path: str) -> Settings:
    """D's settings from the config file at `path`.

    Raises:
        ConfigError: the file is wrong.
    """
    config = load_section(path, "decode", DecodeConfig)
    secret = read_secret(config.secret_file, config.secret_variable)
    if secret is None and not is_loopback(config.host):
        raise ConfigError(f"{path}: key `decode.host`: without a secret only loopback addresses, not {config.host}")
    engine = role_engine_config(path, "decode")
    check_buffer_device(path, "decode", config.kv_buffer_device, engine.device)
    folder = Path(path).resolve().parent
    tls = server_context(config.tls, "decode.tls", folder)
    peer_tls = None if config.prefill_tls is None else client_context(config.prefill_tls, "decode.prefill_tls", folder)
    return Settings(config=config, engine=engine, secret=secret, tls=tls, prefill_tls=peer_tls)


def serve(settings: Settings) -> Coroutine[Any, Any, None]:
    """Serve until a signal."""
    # Late: torch takes seconds to import, and a wrong config has been refused before.
    from common.serving import process
    from decode.role import DecodeRole

    role = DecodeRole(
        settings.config, settings.engine, settings.secret, tls=settings.tls, prefill_tls=settings.prefill_tls
    )
    return process.serve(role)

"""`pd-prefill --config FILE`: the command line of P.

Owns: what must hold of P's settings beyond their types. Building P: `prefill.role`.
"""

import ssl
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config.engine import EngineConfig
from common.config.loader import load_section, role_engine_config
from common.config.secret import read_secret
from common.config.tls import server_context
from common.errors import ConfigError
from common.serving.program import run
from kv_transfer.compatibility import check_buffer_device
from kv_transfer.reference import is_loopback
from prefill.config import PrefillConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything the config file says about P."""

    config: PrefillConfig
    engine: EngineConfig
    secret: bytes | None
    tls: ssl.SSLContext | None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    return run("pd-prefill", argv, read, serve)


def read(path: str) -> Settings:
    """P's settings from the config file at `path`.

    Raises:
        ConfigError: the file is wrong.
    """
    config = load_section(path, "prefill", PrefillConfig)
    secret = read_secret(config.secret_file, config.secret_variable)
    for key in ("host", "advertised_host"):
        host = getattr(config, key)
        if secret is None and host is not None and not is_loopback(host):
            raise ConfigError(f"{path}: key `prefill.{key}`: without a secret only loopback addresses, not {host}")
    engine = role_engine_config(path, "prefill")
    check_buffer_device(path, "prefill", config.kv_buffer_device, engine.device)
    tls = server_context(config.tls, "prefill.tls", Path(path).resolve().parent)
    return Settings(config=config, engine=engine, secret=secret, tls=tls)


def serve(settings: Settings) -> Coroutine[Any, Any, None]:
    """Serve until a signal."""
    # Late: torch takes seconds to import, and a wrong config has been refused before.
    from common.serving import process
    from prefill.role import PrefillRole

    return process.serve(PrefillRole(settings.config, settings.engine, settings.secret, settings.tls))

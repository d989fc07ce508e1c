"""`pd-proxy --config FILE`: reads the settings, builds the proxy, serves until a signal.

Owns: the command line, exit codes (config 2, start-up 1) and the event loop. Does not know: what a request is.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence

import structlog

from common.clock import SystemClock
from common.config.loader import load_section
from common.errors import ConfigError, StartupError
from common.tasks import wait_for_signal
from common.telemetry.logging import configure_logging
from proxy.config import ProxyConfig
from proxy.server import running

_log = structlog.get_logger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    options = _parse(argv)
    try:
        config = load_section(options.config, "proxy", ProxyConfig)
        check(options.config, config)
        if options.command == "check":
            return 0
        configure_logging("proxy", config.log_json, config.log_level)
        _run(config)
    except ConfigError as error:
        sys.stderr.write(f"pd-proxy: {error}\n")
        return 2
    except StartupError as error:
        sys.stderr.write(f"pd-proxy: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def check(path: str, config: ProxyConfig) -> None:
    """What types alone cannot say.

    Raises:
        ConfigError: an engine's address is no URL, or there is no decode engine.
    """
    for role in ("prefill", "decode"):
        for url in getattr(config.fleet, role):
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"{path}: key `proxy.fleet.{role}`: {url!r} must start with http:// or https://")
    if not config.fleet.decode:
        raise ConfigError(f"{path}: key `proxy.fleet.decode` names no engine; at least one URL is needed")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="pd-proxy", description="Prefill/decode proxy.")
    parser.add_argument("command", nargs="?", choices=["serve", "check"], default="serve", help="check only validates")
    parser.add_argument("--config", required=True, help="YAML file with a section `proxy`")
    return parser.parse_args(argv)


def _run(config: ProxyConfig) -> None:
    try:
        import uvloop
    except ImportError:
        asyncio.run(_serve(config))
    else:
        uvloop.run(_serve(config))


async def _serve(config: ProxyConfig) -> None:
    async with running(config, SystemClock()):
        signal = await wait_for_signal()
        _log.info("proxy.stopping", signal=signal.name)
    _log.info("proxy.stopped")

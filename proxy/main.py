"""`pd-proxy --config FILE`: reads the settings, builds the proxy, serves until a signal.

Owns: the command line, exit codes (config 2, start-up 1) and the event loop. Does not know: what a request is.
"""

import argparse
import asyncio
import gc
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog

from common.clock import SystemClock
from common.config.loader import load_section
from common.config.tls import server_context
from common.errors import ConfigError, StartupError
from common.tasks import Supervisor, wait_for_signal
from common.telemetry.logging import configure_logging
from proxy.assembly import assemble
from proxy.config import ProxyConfig
from proxy.server import RunningProxy, allow_many_sockets, running
from proxy.upstream import Upstream
from proxy.workers import run_workers

T = TypeVar("T")

_log = structlog.get_logger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    options = _parse(argv)
    try:
        config = load(options.config)
        if options.command == "check":
            _run(_check(config))
            return 0
        allow_many_sockets()
        configure_logging("proxy", config.log_json, config.log_level)
        if options.workers > 1:
            return _run(run_workers(options.config, options.workers))
        _run(_serve(options.config, config, options.shared_file))
    except ConfigError as error:
        sys.stderr.write(f"pd-proxy: {error}\n")
        return 2
    except StartupError as error:
        sys.stderr.write(f"pd-proxy: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def load(path: str) -> ProxyConfig:
    """The settings, checked beyond their types; relative file names start at the config file's folder.

    Raises:
        ConfigError: something is wrong with them.
    """
    config = load_section(path, "proxy", ProxyConfig)
    for role in ("prefill", "decode"):
        for url in getattr(config.fleet, role):
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"{path}: key `proxy.fleet.{role}`: {url!r} must start with http:// or https://")
    if config.tracing.otlp_url is not None and not config.tracing.otlp_url.startswith("http://"):
        raise ConfigError(f"{path}: key `proxy.tracing.otlp_url` must start with http://")
    sources = (config.fleet.file, config.fleet.srv, config.fleet.kubernetes)
    if not config.fleet.decode and all(source is None for source in sources):
        raise ConfigError(f"{path}: key `proxy.fleet.decode` names no engine; at least one URL is needed")
    return _with_absolute_files(config, Path(path).resolve().parent)


def _with_absolute_files(config: ProxyConfig, folder: Path) -> ProxyConfig:
    parts: dict[str, msgspec.Struct] = {}
    for section in ("fleet", "keys", "tls", "engine_tls"):
        part = getattr(config, section)
        names = [name for name in part.__struct_fields__ if name == "file" or name.endswith("_file")]
        files = {name: str(folder / getattr(part, name)) for name in names if getattr(part, name) is not None}
        parts[section] = msgspec.structs.replace(part, **files)
    cluster = config.fleet.kubernetes
    if cluster is not None and cluster.kubeconfig is not None:
        cluster = msgspec.structs.replace(cluster, kubeconfig=str(folder / cluster.kubeconfig))
        parts["fleet"] = msgspec.structs.replace(parts["fleet"], kubernetes=cluster)
    return msgspec.structs.replace(config, **parts)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="pd-proxy", description="Prefill/decode proxy.")
    parser.add_argument("command", nargs="?", choices=["serve", "check"], default="serve", help="check only validates")
    parser.add_argument("--config", required=True, help="YAML file with a section `proxy`")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the port")
    parser.add_argument("--shared-file", type=Path, help=argparse.SUPPRESS)  # one of several workers
    return parser.parse_args(argv)


def _run(work: Coroutine[Any, Any, T]) -> T:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    result: T = uvloop.run(work)
    return result


async def _check(config: ProxyConfig) -> None:
    """Make everything that the settings name, listen nowhere."""
    server_context(config.tls, "proxy.tls")
    upstream = Upstream(connect_s=config.timeouts.connect_s, keepalive_s=config.keepalive_s)
    async with upstream, Supervisor() as background:
        assemble(config, SystemClock(), upstream, background)


async def _serve(path: str, config: ProxyConfig, shared_file: Path | None) -> None:
    is_sharing = shared_file is not None
    async with running(config, SystemClock(), reuse_port=is_sharing, shared_file=shared_file) as proxy:
        # What is here now stays: a collection that looks through it again and again is time taken from requests.
        gc.collect()
        gc.freeze()
        signal = await wait_for_signal(on_hangup=lambda: _reload(path, proxy))
        _log.info("proxy.stopping", signal=signal.name)
    _log.info("proxy.stopped")


def _reload(path: str, proxy: RunningProxy) -> None:
    try:
        proxy.reload(load(path))
    except ConfigError as error:
        _log.error("proxy.reload_refused", reason=str(error))

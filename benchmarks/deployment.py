"""Our own processes for a benchmark: one P, one D, and a proxy per mode in front of the same pair.

Owns: writing the config variants to a temporary folder, starting, waiting, stopping.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from benchmarks.ports import free_port

READY_WITHIN_S = 180.0


@contextmanager
def running_modes(config: Path, modes: Sequence[str]) -> Iterator[dict[str, str]]:
    """Start D, P and one proxy per `structured_output` mode; yields mode → proxy URL."""
    sections = absolute(yaml.safe_load(config.read_text()), config)
    ports = {role: free_port() for role in ("prefill", "decode", *modes)}
    with tempfile.TemporaryDirectory() as folder, stopped_at_the_end() as children:
        for role in ("decode", "prefill"):
            path = _write(Path(folder) / f"{role}.yaml", with_keys(sections, role, {"port": ports[role]}))
            children.append(_start(role, path))
        fleet = {role: [f"http://127.0.0.1:{ports[role]}"] for role in ("prefill", "decode")}
        for mode in modes:
            proxy = {"port": ports[mode], "structured_output": mode, "fleet": fleet}
            children.append(_start("proxy", _write(Path(folder) / f"{mode}.yaml", with_keys(sections, "proxy", proxy))))
        urls = {mode: f"http://127.0.0.1:{ports[mode]}" for mode in modes}
        for url in urls.values():
            _wait_ready(url, children)
        yield urls


@contextmanager
def running_pair(
    config: Path, engine_keys: Mapping[str, Any] | None = None
) -> Iterator[tuple[dict[str, str], tuple[int, ...]]]:
    """Start the deployment of `config` on free ports; yields (`single`: D alone, `pair`: the proxy) and process ids.

    `engine_keys` override those of its section `engine`.
    """
    sections = with_keys(absolute(yaml.safe_load(config.read_text()), config), "engine", engine_keys or {})
    ports = {role: free_port() for role in ("prefill", "decode", "proxy")}
    fleet = {role: [f"http://127.0.0.1:{ports[role]}"] for role in ("prefill", "decode")}
    for role, port in ports.items():
        sections = with_keys(sections, role, {"port": port})
    with tempfile.TemporaryDirectory() as folder, stopped_at_the_end() as children:
        path = _write(Path(folder) / "pd.yaml", with_keys(sections, "proxy", {"fleet": fleet}))
        children.extend(_start(role, path) for role in ("decode", "prefill", "proxy"))
        urls = {"single": f"http://127.0.0.1:{ports['decode']}", "pair": f"http://127.0.0.1:{ports['proxy']}"}
        _wait_ready(urls["pair"], children)
        yield urls, tuple(child.pid for child in children)


def absolute(sections: Mapping[str, Any], config: Path) -> dict[str, Any]:
    """The sections with a model path that holds from any folder."""
    engine = dict(sections.get("engine", {}))
    engine["model"] = str((config.parent / engine["model"]).resolve())
    return {**sections, "engine": engine}


def with_keys(sections: Mapping[str, Any], name: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which `keys` override those of section `name`."""
    return {**sections, name: {**sections.get(name, {}), **keys}}


def _write(path: Path, sections: Mapping[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(dict(sections)))
    return path


def _start(role: str, config: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", role, "--config", str(config)], stdout=subprocess.DEVNULL)


@contextmanager
def stopped_at_the_end(
    end_within_s: float = 15.0, *, in_own_groups: bool = False
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Yields a list; whoever is put on it is asked to end when the block is left, and killed when it does not.

    Args:
        end_within_s: how long each may take to end.
        in_own_groups: each leads a process group, all of which is told, and of which nothing stays behind.
    """
    children: list[subprocess.Popen[bytes]] = []
    tell = _tell_group if in_own_groups else _tell
    try:
        yield children
    finally:
        for child in children:
            tell(child, signal.SIGTERM)
        for child in children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(timeout=end_within_s)
            tell(child, signal.SIGKILL)
            child.wait()


def _tell(child: subprocess.Popen[bytes], number: int) -> None:
    child.send_signal(number)


def _tell_group(child: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, number)


def _wait_ready(url: str, children: Sequence[subprocess.Popen[bytes]]) -> None:
    give_up_at = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < give_up_at:
        for child in children:
            if child.poll() is not None:
                raise SystemExit(f"{child.args!r} exited with {child.returncode}")
        try:
            urllib.request.urlopen(url + "/ready", timeout=2).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise SystemExit(f"{url} was not ready within {READY_WITHIN_S:.0f} s")

"""A stock vLLM pair and what may stand in front of it: pd-proxy, and a plain relay that shows P the constraint or not.

Owns: starting and stopping them.
"""

import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml

from benchmarks.deployment import stopped_at_the_end, with_keys
from benchmarks.ports import free_port
from benchmarks.vllm_process import ROLES, let_others_first, pair_command, vllm_start

_READY_WITHIN_S = 900.0
_END_WITHIN_S = 30.0


@contextmanager
def running_fronts(config: Path, peers: Path, relay: Path | None) -> Iterator[dict[str, str]]:
    """Start the pair and its fronts; yields name → URL.

    Args:
        config: pd-proxy's; its ports and fleet are replaced.
        peers: folder with the environment `vllm` and the folder `model`.
        relay: script of the plain relay; None leaves it out.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        stopped_at_the_end(_END_WITHIN_S, in_own_groups=True) as children,
    ):
        logs = Path(folder)
        engines = [vllm_start(peers, role) for role in ROLES]
        p, d = (engine.url for engine in engines)
        ports = {"pd-proxy": free_port()}
        children.append(_proxy(config, ports["pd-proxy"], (p, d), logs))
        if relay is not None:
            for name, more in (("relay", []), ("relay-strip", ["--strip"])):
                ports[name] = free_port()
                command = [str(peers / "vllm/bin/python"), str(relay), "--port", str(ports[name]), *more]
                children.append(_start([*command, "--prefill", p, "--decode", d], logs / name, {}))
        urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        # The fronts first: beside a pair that is up, a new process gets hardly any processor time.
        _wait([f"{url}/{'health' if name == 'pd-proxy' else 'docs'}" for name, url in urls.items()], children, logs)
        children.append(_start(pair_command(engines, logs), logs / "pair", {}))
        let_others_first(children[-1].pid)
        _wait([f"{p}/health", f"{d}/health", f"{urls['pd-proxy']}/ready"], children, logs)
        yield urls


def _proxy(config: Path, port: int, engines: tuple[str, str], logs: Path) -> subprocess.Popen[bytes]:
    fleet = {"prefill": [engines[0]], "decode": [engines[1]]}
    sections = with_keys(yaml.safe_load(config.read_text()), "proxy", {"port": port, "fleet": fleet})
    path = logs / "pd_vllm.yaml"
    path.write_text(yaml.safe_dump(sections))
    return _start([sys.executable, "-m", "proxy", "--config", str(path)], logs / "pd-proxy", {})


def _start(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """In a process group of its own: vLLM has children that outlive it otherwise."""
    with log.with_suffix(".log").open("ab") as output:
        return subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, **environment}, start_new_session=True
        )


def _wait(urls: Sequence[str], children: Sequence[subprocess.Popen[bytes]], logs: Path) -> None:
    give_up_s = time.monotonic() + _READY_WITHIN_S
    for url in urls:
        while True:
            if any(child.poll() is not None for child in children) or time.monotonic() > give_up_s:
                ends = [f"{log.name}:\n{log.read_text(errors='replace')[-1500:]}" for log in sorted(logs.glob("*.log"))]
                raise SystemExit(f"{url} does not answer\n" + "\n".join(ends))
            try:
                urllib.request.urlopen(url, timeout=2).close()
                break
            except OSError:
                time.sleep(0.2)

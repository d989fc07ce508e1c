"""Two P, two D and one proxy as processes that can be killed, frozen and started again.

Owns: config files, processes, readiness. Idea: fault injection from outside, as operators meet it (signals only).
"""

import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from benchmarks import scrape
from benchmarks.deployment import absolute, with_keys
from benchmarks.ports import free_port

READY_WITHIN_S = 180.0


@dataclass
class Fleet:
    """Processes by name (`prefill0`, `decode1`, `proxy`), each with its own config file and port."""

    folder: Path
    ports: dict[str, int]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def engines(self) -> list[str]:
        """All but the proxy."""
        return [name for name in self.ports if name != "proxy"]

    def url(self, name: str) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.ports[name]}"

    def start(self, name: str) -> None:
        """Start it; does not wait."""
        command = [sys.executable, "-m", name.rstrip("0123456789"), "--config", str(self.folder / f"{name}.yaml")]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal; after SIGKILL it is gone and reaped."""
        self.processes[name].send_signal(number)
        if number is signal.SIGKILL:
            self.processes.pop(name).wait()

    def wait_ready(self, name: str) -> None:
        """Poll `/ready`. Raises: SystemExit when the process ends or takes too long."""
        give_up_at = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < give_up_at:
            if self.processes[name].poll() is not None:
                raise SystemExit(f"{name} exited: {(self.folder / f'{name}.log').read_text()[-2000:]}")
            try:
                urllib.request.urlopen(self.url(name) + "/ready", timeout=2).close()
            except OSError:
                time.sleep(0.2)
            else:
                return
        raise SystemExit(f"{name} was not ready within {READY_WITHIN_S:.0f} s")

    def total(self, name: str, metric: str) -> float:
        """Sum of a metric over its labels."""
        return scrape.total(self.url(name), metric)

    def stop(self) -> None:
        """SIGTERM all, SIGKILL what does not end."""
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def running_fleet(config: Path, engine: Mapping[str, Any], num_prefill: int, num_decode: int) -> Iterator[Fleet]:
    """Start all with `engine` over the config's own keys, wait until each is ready, stop at the end."""
    sections = with_keys(absolute(yaml.safe_load(config.read_text()), config), "engine", engine)
    names = [f"prefill{i}" for i in range(num_prefill)] + [f"decode{i}" for i in range(num_decode)] + ["proxy"]
    with TemporaryDirectory() as folder:
        fleet = Fleet(Path(folder), {name: free_port() for name in names})
        for name in names:
            _write(fleet, name, sections, num_prefill, num_decode)
        try:
            for name in names:
                fleet.start(name)
            for name in names:
                fleet.wait_ready(name)
            yield fleet
        finally:
            fleet.stop()


def _write(fleet: Fleet, name: str, sections: dict[str, Any], num_prefill: int, num_decode: int) -> None:
    role = name.rstrip("0123456789")
    keys: dict[str, Any] = {"port": fleet.ports[name]}
    if role == "proxy":
        urls = {"prefill": [fleet.url(f"prefill{i}") for i in range(num_prefill)]}
        urls["decode"] = [fleet.url(f"decode{i}") for i in range(num_decode)]
        keys["fleet"] = {**sections.get("proxy", {}).get("fleet", {}), **urls}
    if role == "prefill":
        keys["lease_ttl_s"] = 10.0  # so that leases of killed readers end within the run
    (fleet.folder / f"{name}.yaml").write_text(yaml.safe_dump(with_keys(sections, role, keys)))

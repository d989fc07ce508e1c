"""P, D and the proxy as real processes on free ports, with the default model and real NIXL; for e2e and fault tests."""

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
READY_WITHIN_S = 120.0
ROLES = ("decode", "prefill", "proxy")

ENGINE = {
    "model": str(MODEL),
    "served_model_name": "smollm2",
    "dtype": "int8",  # the file's own 4-bit blocks, without further loss, and several times faster here
    "max_model_len_tokens": 4096,
    "kv_cache_bytes": 256 << 20,
    "max_num_seqs": 16,
    "num_threads": 1,
    "speculative_config": {"method": "grammar+ngram"},  # as in configs/pd.yaml
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def get_json(url: str, timeout_s: float = 10.0, tls: ssl.SSLContext | None = None) -> Any:
    with urllib.request.urlopen(url, timeout=timeout_s, context=tls) as response:
        return json.load(response)


def post_json(url: str, body: Mapping[str, Any], timeout_s: float = 120.0) -> tuple[int, Any, Mapping[str, str]]:
    """Status, decoded body, headers; a 4xx/5xx is an answer, not an exception."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return response.status, json.load(response), dict(response.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error), dict(error.headers)


@dataclass
class Trio:
    """Three running processes and how to talk to them; over TLS where `tls` is given."""

    config: Path
    ports: dict[str, int]
    logs: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    tls: ssl.SSLContext | None = None

    def url(self, role: str) -> str:
        return f"{'http' if self.tls is None else 'https'}://127.0.0.1:{self.ports[role]}"

    def start(self, role: str) -> None:
        with (self.logs / f"{role}.log").open("ab") as log:
            self.processes[role] = subprocess.Popen(
                [sys.executable, "-m", role, "--config", str(self.config)],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env=self.environment,
            )

    def stop(self, role: str, signal_number: int = signal.SIGTERM) -> int:
        process = self.processes.pop(role)
        process.send_signal(signal_number)
        try:
            return process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=10)
            raise AssertionError(f"{role} did not stop within 20 s of signal {signal_number}") from None

    def wait_ready(self, role: str, within_s: float = READY_WITHIN_S) -> None:
        give_up_at = time.monotonic() + within_s
        while True:
            process = self.processes[role]
            if process.poll() is not None:
                raise AssertionError(f"{role} exited with {process.returncode}:\n{self.log(role)}")
            try:
                get_json(self.url(role) + "/ready", timeout_s=2.0, tls=self.tls)
                return
            except (OSError, ValueError):
                if time.monotonic() > give_up_at:
                    raise AssertionError(f"{role} was not ready in {within_s} s:\n{self.log(role)}") from None
                time.sleep(0.1)

    def log(self, role: str, last_chars: int = 4000) -> str:
        return (self.logs / f"{role}.log").read_text(errors="replace")[-last_chars:]

    def metrics(self, role: str) -> dict[str, float]:
        """Sample name with its labels (`name{a="b"}`, labels sorted) → value."""
        with urllib.request.urlopen(self.url(role) + "/metrics", timeout=10, context=self.tls) as response:
            text = response.read().decode()
        samples: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
                samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return samples

    def total(self, role: str, name: str) -> float:
        """Sum of a metric over its labels."""
        return sum(value for key, value in self.metrics(role).items() if key.split("{")[0] == name)


def write_config(folder: Path, ports: Mapping[str, int], overrides: Mapping[str, Any], scheme: str = "http") -> Path:
    """One YAML file for the three roles; `overrides` maps section → keys."""
    sections: dict[str, dict[str, Any]] = {
        "engine": dict(ENGINE),
        "prefill": {"host": "127.0.0.1", "port": ports["prefill"]},
        "decode": {"host": "127.0.0.1", "port": ports["decode"]},
        "proxy": {
            "host": "127.0.0.1",
            "port": ports["proxy"],
            "fleet": {
                "prefill": [f"{scheme}://127.0.0.1:{ports['prefill']}"],
                "decode": [f"{scheme}://127.0.0.1:{ports['decode']}"],
            },
        },
    }
    for section, keys in overrides.items():
        sections[section].update(keys)
    path = folder / "pd.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


@contextmanager
def running_trio(
    folder: Path,
    overrides: Mapping[str, Any] | None = None,
    roles: tuple[str, ...] = ROLES,
    environment: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
) -> Iterator[Trio]:
    """Start the roles, wait until they are ready, stop them at the end; they get `environment`, or this process'.

    With `tls`, they are asked over it; that they speak it is for `overrides` to say.
    """
    ports = {role: free_port() for role in ROLES}
    folder.mkdir(parents=True, exist_ok=True)
    config = write_config(folder, ports, overrides or {}, "http" if tls is None else "https")
    trio = Trio(config, ports, folder, environment=dict(os.environ if environment is None else environment), tls=tls)
    try:
        for role in roles:
            trio.start(role)
        for role in roles:
            trio.wait_ready(role)
        yield trio
    finally:
        for role in list(trio.processes):
            process = trio.processes.pop(role)
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=10)


def shared_schemas() -> list[dict[str, Any]]:
    """The schemas of the public sample where `PD_SHARED` names its folder, else the small copy in tests/data."""
    folder = os.environ.get("PD_SHARED")
    path = Path(folder) / "data" / "maskbench_sample.jsonl" if folder else ROOT / "tests" / "data" / "schemas.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]

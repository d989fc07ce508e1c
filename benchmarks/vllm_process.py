"""How a stock vLLM is started as one half of a pair: NixlConnector on the CPU, one core, asleep when idle.

Owns: its command and its environment; benchmarks and interoperability tests start the same thing.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.ports import free_port

MODEL_NAME = "smollm2"
ROLES = ("kv_producer", "kv_consumer")
"""P and D, as vLLM names them; each is bound to the core of its place here."""


@dataclass(frozen=True, slots=True)
class VllmStart:
    """What to run.

    Attributes:
        command: program and arguments.
        environment: beside what is set already.
        url: where it will listen.
    """

    command: list[str]
    environment: Mapping[str, str]
    url: str


def vllm_start(peers: Path, role: str) -> VllmStart:
    """One half.

    Args:
        peers: folder with the environment `vllm` and the Hugging Face folder `model`.
        role: one of `ROLES`.
    """
    port = free_port()
    transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
    command = [str(peers / "vllm/bin/vllm"), "serve", str(peers / "model"), "--served-model-name", MODEL_NAME]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "4096"]
    command += ["--max-num-seqs", "32", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    command += ["--kv-transfer-config", msgspec.json.encode(transfer).decode()]
    environment = {
        "PATH": f"{peers / 'vllm/bin'}:{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(ROLES.index(role)),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "VLLM_SLEEP_WHEN_IDLE": "1",
    }
    return VllmStart(command, environment, f"http://127.0.0.1:{port}")


def pair_command(engines: Sequence[VllmStart], logs: Path) -> list[str]:
    """A shell that runs `engines` (one per role) in its own session, and ends when one of them does.

    Together in one session, because their workers poll without rest, two threads each, and not only on the core they
    are bound to. A kernel that shares its time among sessions (autogroup) starves an engine that is alone in its
    session, and clients beside the pair: TTFT is then 1 to 30 s by chance instead of 0.5 s.

    Args:
        engines: P and D.
        logs: folder of `ROLE.log`.
    """
    lines = []
    for engine, role in zip(engines, ROLES, strict=True):
        variables = shlex.join(f"{name}={value}" for name, value in engine.environment.items())
        log = shlex.quote(str(logs / f"{role}.log"))
        lines.append(f"env {variables} {shlex.join(engine.command)} >>{log} 2>&1 &")
    return ["bash", "-c", "\n".join([*lines, "wait -n; exit 1"])]


def let_others_first(pid: int) -> None:
    """Have the session that `pid` leads give way to all others, where the kernel shares its time among sessions."""
    with suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text("19")

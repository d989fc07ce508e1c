"""The peer's sampler in its own interpreter, driven turn by turn over its standard input."""

import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from benchmarks.sampler.cases import Case, Shape

_WORKER = Path(__file__).parent / "peer_worker.py"


class Peer:
    """One process of the peer, for one job after another.

    Args:
        python: the peer's interpreter; None: there is no peer.
        threads: torch threads.
        clock: a key of `cases.CLOCKS`.
    """

    def __init__(self, python: Path | None, threads: int, clock: str) -> None:
        self._clock = clock
        self._python = python
        self._threads = threads
        self._process: subprocess.Popen[str] | None = None

    @property
    def is_there(self) -> bool:
        """Whether there is a peer to measure."""
        return self._python is not None

    def __enter__(self) -> "Peer":
        if self._python is not None:
            self._process = subprocess.Popen(
                [str(self._python), str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.communicate("\n")

    def prepare(self, case: Case, shape: Shape, logits_file: Path) -> None:
        """Set the next job up; its steps follow."""
        if self.is_there:
            job = {
                "case": asdict(case),
                "shape": asdict(shape),
                "logits_file": str(logits_file),
                "threads": self._threads,
                "clock": self._clock,
            }
            self._ask(json.dumps(job))

    def step_s(self) -> float:
        """Seconds of one step."""
        return float(self._ask("step"))

    def _ask(self, line: str) -> str:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise RuntimeError("no peer was started")
        process.stdin.write(line + "\n")
        process.stdin.flush()
        while answer := process.stdout.readline():
            if answer.startswith("answer "):
                return answer.removeprefix("answer ").strip()
        raise RuntimeError(f"the peer ended with status {process.wait()}")

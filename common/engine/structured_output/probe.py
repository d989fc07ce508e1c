"""Try a compilation where it can be ended: in a process that may be killed, under a memory limit the kernel keeps.

Owns: the probe server's life and the probes it forks. Journey rows 3b and 6, before the compile in this process.
Why a throw-away compile instead of matchers in that process: docs/decisions/0003-grammar-process.md.
Does not know: caches, tickets, which constraints need it.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import common
from common.clock import Deadline
from common.engine.structured_output.probe_wire import (
    Fork,
    Load,
    Loaded,
    ProbeJob,
    ProbeReport,
    ProbeVerdict,
    ProbeVocabulary,
    Started,
    receive,
    send,
)
from common.engine.structured_output.vocabulary import Vocabulary
from common.errors import StartupError
from common.wire.constraint import Constraint

_LOAD_TIMEOUT_S = 120.0
_START_TIMEOUT_S = 30.0
_BRIEF_S = 0.2
_LEAST_PRIORITY = 19


class CompileProbe:
    """One probe server, started when first needed and again when it died.

    Args:
        vocabulary: what grammars are compiled against.
        memory_bytes: address space one compile may add.
    """

    def __init__(self, vocabulary: Vocabulary, memory_bytes: int) -> None:
        self._vocabulary = ProbeVocabulary(
            token_bytes=list(vocabulary.token_bytes),
            special_token_ids=sorted(vocabulary.special_token_ids),
            end_token_id=vocabulary.end_token_id,
            description=vocabulary.description,
        )
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._server: _Server | None = None
        self._running: set[int] = set()
        self._closed = False

    def load(self, backend: str) -> None:
        """Start the server and load `backend` there; returns at once when that is done already.

        Importing a library takes seconds, so this is apart from any compile's deadline.

        Raises:
            StartupError: it cannot be loaded.
        """
        with self._lock:
            self._alive().load(backend)

    def try_compile(self, backend: str, constraint: Constraint, deadline: Deadline) -> ProbeReport:
        """Compile in a fresh probe; blocks until the verdict, at most until `deadline`.

        The result is thrown away, but for one that can be handed over (`ProbeReport.packed`).

        A probe that passes the deadline is dead before this returns: nothing goes on in the background.
        Raises `StartupError` when the backend cannot be loaded.
        """
        timeout_s = deadline.remaining_s()
        if timeout_s <= 0.0:
            return ProbeReport(verdict=ProbeVerdict.TIMED_OUT, reason="other compilations were in front of it")
        job = ProbeJob(
            backend=backend,
            constraint=constraint,
            memory_bytes=self._memory_bytes,
            cpu_s=int(2 * timeout_s) + 2,
        )
        try:
            with self._lock:
                server = self._alive()
                server.load(backend)
                channel = server.fork()
        except OSError:
            return ProbeReport(verdict=ProbeVerdict.CRASHED)
        with channel:
            return self._run(channel, job, timeout_s)

    def _run(self, channel: socket.socket, job: ProbeJob, timeout_s: float) -> ProbeReport:
        pid: int | None = None
        try:
            channel.settimeout(_START_TIMEOUT_S)
            pid = receive(channel, Started).pid
            with self._lock:
                self._running.add(pid)
            channel.settimeout(timeout_s)
            send(channel, job)
            return self._report(channel, pid, timeout_s)
        except TimeoutError:
            _end(channel, pid)
            return ProbeReport(verdict=ProbeVerdict.TIMED_OUT)
        except (OSError, EOFError):
            return ProbeReport(verdict=ProbeVerdict.CRASHED)
        finally:
            if pid is not None:
                with self._lock:
                    self._running.discard(pid)

    @staticmethod
    def _report(channel: socket.socket, pid: int, timeout_s: float) -> ProbeReport:
        """What the probe says. One that takes long goes on with what the step loop leaves of the processors."""
        if timeout_s > _BRIEF_S:
            channel.settimeout(_BRIEF_S)
            with contextlib.suppress(TimeoutError):
                channel.recv(1, socket.MSG_PEEK)
                return receive(channel, ProbeReport)
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, pid, _LEAST_PRIORITY)
            channel.settimeout(timeout_s - _BRIEF_S)
        return receive(channel, ProbeReport)

    def server_pid(self) -> int | None:
        """The server's process id, None before the first use."""
        return self._server.pid if self._server is not None else None

    def close(self) -> None:
        """End the server and the probes at work for good; whoever waits for one learns that it crashed."""
        with self._lock:
            self._closed = True
            for pid in self._running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if self._server is not None:
                self._server.end()

    def _alive(self) -> "_Server":
        """The running server; call with the lock held."""
        if self._closed:
            raise ConnectionError("the probe is closed")
        if self._server is None or not self._server.is_alive():
            if self._server is not None:
                self._server.end()
            self._server = _Server(self._vocabulary)
        return self._server


class _Server:
    """The process and its control channel."""

    def __init__(self, vocabulary: ProbeVocabulary) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "common.engine.structured_output.probe_server", str(theirs.fileno())],
                cwd=Path(common.__file__).parent.parent,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self._loaded: set[str] = set()
        self._control.settimeout(_LOAD_TIMEOUT_S)
        send(self._control, vocabulary)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def load(self, backend: str) -> None:
        """See `CompileProbe.load`."""
        if backend in self._loaded:
            return
        try:
            send(self._control, Load(backend=backend))
            reason = receive(self._control, Loaded).reason
        except (OSError, EOFError) as error:
            self.end()
            raise StartupError(f"the probe server died loading {backend}") from error
        if reason:
            raise StartupError(f"the probe server cannot load {backend}: {reason}")
        self._loaded.add(backend)

    def fork(self) -> socket.socket:
        """A channel to a fresh probe. Raises `OSError` when the server is gone."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                send(self._control, Fork(), (theirs.fileno(),))
            except OSError:
                ours.close()
                raise
        return ours

    def end(self) -> None:
        """Kill it and wait until it is gone. Idempotent."""
        self._process.kill()
        self._process.wait()
        self._control.close()


def _end(channel: socket.socket, pid: int | None) -> None:
    """Kill a probe that still holds its side of the channel (so `pid` is still its own), and wait until it let go."""
    if pid is None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    channel.settimeout(_START_TIMEOUT_S)
    with contextlib.suppress(OSError):
        while channel.recv(1 << 16):
            pass

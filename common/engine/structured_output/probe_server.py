"""The probe server: holds the grammar libraries and forks a probe for each dangerous compile.

    engine --control--> probe server --fork--> probe --job channel--> engine
                        (libraries, vocabulary)  (limits, one compile, exit)

Run as `python -m common.engine.structured_output.probe_server FD`. Owns: the limits of its forks. Single-threaded, so
that forking is safe; never compiles itself, so that it stays small and the memory of a probe ends with it.
"""

import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

import numpy as np

from common.clock import Clock, SystemClock
from common.engine.structured_output.backend import Backend, BackendMatcher, CompiledGrammar, FillRow, PortableBackend
from common.engine.structured_output.backends import BackendSet
from common.engine.structured_output.lean_import import standing_in
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
    receive_control,
    send,
)
from common.engine.structured_output.vocabulary import Vocabulary
from common.errors import ConstraintRejected

_NICENESS = 5
_WALK_TOKENS = 16
_UNLIMITED_STACK_BYTES = 2 << 20
"""What glibc gives a thread where the stack has no limit."""
_JOB_READ_TIMEOUT_S = 30.0
_MAX_PACKED_BYTES = 16 << 20
"""Unpacking holds the interpreter, 2.4 ms per MB: what is larger is compiled again, beside the step loop."""


def main() -> None:
    """Serve the control channel until the engine closes it."""
    os.nice(_NICENESS)
    os.environ["TVM_FFI_DISABLE_TORCH_C_DLPACK"] = "1"  # noqa: TID251 read by a library of xgrammar; there is no torch here
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps probes
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the engine's to handle
    control = socket.socket(fileno=int(sys.argv[1]))
    vocabulary = _vocabulary(receive(control, ProbeVocabulary))
    backends = BackendSet(vocabulary, num_threads=1)
    with standing_in("torch"):
        _serve(control, vocabulary, backends)


def _serve(control: socket.socket, vocabulary: Vocabulary, backends: BackendSet) -> None:
    while True:
        try:
            message, descriptors = receive_control(control)
        except (EOFError, ConnectionError):
            return
        if isinstance(message, Load):
            send(control, _load(message.backend, backends))
        elif isinstance(message, Fork):
            _fork(descriptors[0], control, vocabulary, backends)


def _load(name: str, backends: BackendSet) -> Loaded:
    try:
        backends.get(name)
    except Exception as error:  # noqa: BLE001 any reason a library has not to load is the engine's to report
        return Loaded(reason=f"{type(error).__name__}: {error}")
    return Loaded()


def _fork(descriptor: int, control: socket.socket, vocabulary: Vocabulary, backends: BackendSet) -> None:
    if os.fork() != 0:
        os.close(descriptor)
        return
    control.close()
    _serve_one(socket.socket(fileno=descriptor), vocabulary, backends)


def _serve_one(channel: socket.socket, vocabulary: Vocabulary, backends: BackendSet) -> NoReturn:
    """In the probe: one job, then the process ends, whatever happens."""
    status = 1
    try:
        channel.settimeout(_JOB_READ_TIMEOUT_S)
        send(channel, Started(pid=os.getpid()))
        job = receive(channel, ProbeJob)
        send(channel, _run(job, backends.get(job.backend), vocabulary, SystemClock()))
        status = 0
    finally:
        os._exit(status)


def _run(job: ProbeJob, backend: Backend, vocabulary: Vocabulary, clock: Clock) -> ProbeReport:
    _limit(job)
    started_s = clock.now_s()
    try:
        grammar = backend.compile(job.constraint)
        compile_s = clock.now_s() - started_s
        worst_fill_s = _walk(backend, grammar.start(), vocabulary, clock)
        packed = _packed(backend, grammar)
        num_bytes = grammar.num_bytes
    except ConstraintRejected as error:
        verdict = ProbeVerdict.OUT_OF_MEMORY if "bad_alloc" in error.message else ProbeVerdict.REJECTED
        return ProbeReport(verdict=verdict, reason=error.message)
    except MemoryError:
        return ProbeReport(verdict=ProbeVerdict.OUT_OF_MEMORY)
    except Exception as error:  # noqa: BLE001 whatever else a library throws is reported, not lost with the process
        return ProbeReport(verdict=ProbeVerdict.CRASHED, reason=f"{type(error).__name__}: {error}")
    return ProbeReport(
        verdict=ProbeVerdict.COMPILED,
        compile_s=compile_s,
        worst_fill_s=worst_fill_s,
        num_bytes=num_bytes,
        packed=packed,
    )


def _packed(backend: Backend, grammar: CompiledGrammar) -> bytes | None:
    packed = backend.pack(grammar) if isinstance(backend, PortableBackend) else None
    return packed if packed is None or len(packed) <= _MAX_PACKED_BYTES else None


def _walk(backend: Backend, matcher: BackendMatcher, vocabulary: Vocabulary, clock: Clock) -> float:
    """Follow the grammar for a few tokens, always the longest allowed; the slowest mask in seconds."""
    bitmask = np.zeros((1, vocabulary.num_words), dtype=np.int32)
    lengths = np.fromiter(map(len, vocabulary.token_bytes), dtype=np.int32, count=vocabulary.size)
    lengths[vocabulary.end_token_id] = 0
    worst_s = 0.0
    for _ in range(_WALK_TOKENS):
        started_s = clock.now_s()
        backend.fill([FillRow(matcher, 0)], bitmask)
        worst_s = max(worst_s, clock.now_s() - started_s)
        bits = np.unpackbits(bitmask.view(np.uint8)[0], bitorder="little")[: vocabulary.size]
        longest = int(np.argmax(lengths * bits))
        if not lengths[longest] * bits[longest] or not matcher.consume(longest):
            break
    return worst_s


def _limit(job: ProbeJob) -> None:
    """Let the kernel refuse memory beyond the job's, and end a probe that burns CPU with nobody left to end it.

    Half a thread's stack: what recurses further than that dies here, and what does not has room in the engine.
    """
    mapped_pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped_pages * resource.getpagesize() + job.memory_bytes, hard))
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (job.cpu_s, hard))
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    thread_bytes = _UNLIMITED_STACK_BYTES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_STACK, (thread_bytes // 2, hard))


def _vocabulary(table: ProbeVocabulary) -> Vocabulary:
    single = {token: token_id for token_id, token in enumerate(table.token_bytes) if len(token) == 1}

    def encode(text: str) -> list[int]:
        """One token per byte, where the vocabulary has it."""
        # Spelling in single bytes is enough here: nothing is ever generated from what a probe compiles.
        return [single[bytes([byte])] for byte in text.encode() if bytes([byte]) in single]

    return Vocabulary(
        token_bytes=tuple(table.token_bytes),
        special_token_ids=frozenset(table.special_token_ids),
        end_token_id=table.end_token_id,
        description=table.description,
        encode=encode,
    )


if __name__ == "__main__":
    main()

"""Real processes for KV transfer tests: start, ask, stop and kill a P; a D in this process; waiting with a limit."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from common.ids import BlockId, EngineId, RequestId
from common.wire.kv_params import KvReference, parse
from kv_transfer.backends.nixl_backend import NixlBackend
from kv_transfer.driver import TransferDriver
from kv_transfer.interface import PullOrder, TransferOutcome
from tests.support import kv_process
from tests.support.kv_process import a_consumer, layout_of, pool_of

ROOT = Path(__file__).parents[2]
SECRET = "shared"
SHARED_MEMORY, TCP = {"UCX_TLS": "sm,self,tcp"}, {"UCX_TLS": "tcp,self"}
LIMIT_S = 20.0


class Process:
    """A child that answers one JSON line per JSON line."""

    def __init__(self, **config: Any) -> None:
        defaults = {"num_blocks": 64, "block_size": 16, "seed": 1, "secret": SECRET, "engine_id": fresh_name("P")}
        self.config: dict[str, Any] = {**defaults, **config}
        self._child = subprocess.Popen(
            [sys.executable, kv_process.__file__, json.dumps(self.config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.hello: dict[str, Any] = self._line()

    def ask(self, question: object) -> Any:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(question) + "\n")
        self._child.stdin.flush()
        return self._line()

    def hold(self, request: str, block_ids: list[int], num_tokens: int) -> KvReference:
        answer = self.ask({"do": "hold", "request_id": request, "block_ids": block_ids, "num_tokens": num_tokens})
        reference = parse(answer)
        assert isinstance(reference, KvReference)
        return reference

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self.ask({"do": "stats"})
        return stats

    def send(self, number: signal.Signals) -> None:
        self._child.send_signal(number)
        if number is signal.SIGKILL:
            self._child.wait(LIMIT_S)

    def end(self) -> None:
        self._child.kill()
        self._child.wait(LIMIT_S)
        for stream in (self._child.stdin, self._child.stdout):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:
                continue

    def _line(self) -> Any:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        assert line, "the process ended"
        return json.loads(line)


class Reader:
    """A D in this process with a pool of its own."""

    def __init__(
        self, environment: dict[str, str], block_size: int = 16, num_blocks: int = 64, **limits: float
    ) -> None:
        self.block_size = block_size
        self.pool = pool_of(num_blocks, block_size, None)
        self._backend = NixlBackend(fresh_name("D"), environment=environment)
        self.consumer = a_consumer(self._backend, layout_of(self.pool, block_size), SECRET, **limits)
        self._has_outcome = threading.Event()
        self.consumer.on_outcome(self._has_outcome.set)
        self.driver = TransferDriver(self._backend, [self.consumer])
        self.driver.start()

    def start(self, request: str, reference: KvReference, first_block: int = 0) -> None:
        num_blocks = -(-reference.remote_num_tokens // self.block_size)
        self.consumer.expect(RequestId(request), reference)
        self.consumer.start_pull(
            PullOrder(
                request_id=RequestId(request),
                reference=reference,
                start_token=0,
                end_token=reference.remote_num_tokens,
                block_ids=tuple(BlockId(first_block + i) for i in range(num_blocks)),
            )
        )

    def outcome(self, limit_s: float = LIMIT_S) -> TransferOutcome:
        """The next outcome, within the limit."""
        assert self._has_outcome.wait(limit_s), "no outcome in time"
        self._has_outcome.clear()
        (outcome,) = self.consumer.poll()
        return outcome

    def has_outcome(self, within_s: float) -> bool:
        return self._has_outcome.wait(within_s)

    def pull(self, request: str, reference: KvReference) -> TransferOutcome:
        self.start(request, reference)
        return self.outcome()

    def tokens(self, num_tokens: int) -> Any:
        blocks = range(-(-num_tokens // self.block_size))
        return kv_process.tokens_of(self.pool, self.block_size, blocks, 0, num_tokens)

    def close(self) -> None:
        self.consumer.close()
        self.driver.close()


def holds_tokens_of(reader: Reader, process: Process, reference: KvReference) -> bool:
    """Whether the reader's first blocks hold exactly the prompt's KV of the process."""
    size, num_tokens = process.config["block_size"], reference.remote_num_tokens
    source = pool_of(process.config["num_blocks"], size, process.config["seed"])
    wanted = kv_process.tokens_of(source, size, reference.remote_block_ids, 0, num_tokens)
    return np.array_equal(wanted, reader.tokens(num_tokens))


def until(holds: Callable[[], bool], limit_s: float = LIMIT_S, every_s: float = 0.02) -> None:
    """Wait for a fact about another process, which can only be polled."""
    give_up_at = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < give_up_at, "it did not happen in time"
        time.sleep(every_s)


@contextmanager
def running(**config: Any) -> Iterator[Process]:
    process = Process(**config)
    try:
        yield process
    finally:
        process.end()


@contextmanager
def reading(environment: dict[str, str], block_size: int = 16, **limits: float) -> Iterator[Reader]:
    reader = Reader(environment, block_size, **limits)
    try:
        yield reader
    finally:
        reader.close()


def fresh_name(role: str) -> EngineId:
    """An engine id that was never used."""
    return EngineId(f"{role}-{os.urandom(6).hex()}")

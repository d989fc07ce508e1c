"""The one thread that owns the transfer agent: it progresses what is outstanding and sleeps otherwise.

Owns: the thread, its pace and its end. NIXL's own progress thread would spin even when idle; here each actor says after
every step how soon it must run again, and other threads wake the driver when they leave work for it.
Does not know: what its actors do.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from common.errors import TransferError
from kv_transfer.backends.backend import Message, TransferBackend

_LOG = structlog.get_logger(__name__)
_SHORTEST_WAIT_S = 0.001


class Actor(Protocol):
    """Producer or consumer."""

    def bind(self, wake_driver: Callable[[], None]) -> None:
        """Remember how to wake the driver; called once, before it starts."""
        ...

    def on_message(self, message: Message) -> None:
        """A notification came in."""
        ...

    def step(self) -> float | None:
        """Do what can be done now; seconds until the next step is wanted, 0 at once, None only when woken."""
        ...

    def fail(self, reason: str) -> None:
        """The driver stops after an unexpected error: nothing will move any more."""
        ...


class TransferDriver:
    """Runs actors on one agent.

    Args:
        backend: the agent; only the driver's thread touches it from `start` on.
        actors: who has work on it.
    """

    def __init__(self, backend: TransferBackend, actors: Sequence[Actor]) -> None:
        self._backend = backend
        self._actors = tuple(actors)
        self._wanted = threading.Event()
        self._stopping = False
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        for actor in self._actors:
            actor.bind(self.wake)

    @property
    def failure(self) -> str | None:
        """Why the thread ended by itself, or None while all is well."""
        return self._failure

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """There is work. Any thread."""
        self._wanted.set()

    def close(self, timeout_s: float = 5.0) -> None:
        """End the thread, then give the agent back."""
        self._stopping = True
        self.wake()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._backend.close()

    def run_once(self) -> float | None:
        """One round of everything; how long nothing needs to be done (see `Actor.step`)."""
        for message in self._messages():
            for actor in self._actors:
                actor.on_message(message)
        delays = [delay for actor in self._actors if (delay := actor.step()) is not None]
        return min(delays) if delays else None

    def _messages(self) -> Sequence[Message]:
        try:
            return self._backend.messages()
        except TransferError as error:  # one peer's broken connection must not end everybody's transfers
            _LOG.warning("kv_transfer.receive_failed", why=str(error))
            return ()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._rest(self.run_once())
        except Exception as error:  # noqa: BLE001 - last resort: report it instead of a silent dead thread
            self._failure = f"{type(error).__name__}: {error}"
            _LOG.exception("kv_transfer.driver_failed")
            for actor in self._actors:
                actor.fail(self._failure)

    def _rest(self, delay_s: float | None) -> None:
        if self._wanted.is_set() or delay_s == 0.0:
            self._wanted.clear()
            time.sleep(0)  # lets another thread have the interpreter between two polls
        elif delay_s is not None and delay_s < _SHORTEST_WAIT_S:
            time.sleep(delay_s)  # an event cannot wait this short
        else:
            self._wanted.wait(delay_s)
            self._wanted.clear()

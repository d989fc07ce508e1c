"""The driver thread: it wakes for work, sleeps otherwise, and never dies in silence."""

import threading
from collections.abc import Callable, Sequence

from common.clock import ManualClock
from common.errors import TransferError
from kv_transfer.backends.backend import Message
from kv_transfer.backends.memory_backend import MemoryBackend, MemoryFabric
from kv_transfer.driver import TransferDriver


class Recorder:
    """An actor that answers with the delays it is given and stops time when they run out."""

    def __init__(self, *delays: float | Exception | None) -> None:
        self.delays = list(delays)
        self.messages: list[Message] = []
        self.reason: str | None = None
        self.stepped = threading.Semaphore(0)
        self.failed = threading.Event()
        self.wake: Callable[[], None] = lambda: None

    def bind(self, wake_driver: Callable[[], None]) -> None:
        self.wake = wake_driver

    def on_message(self, message: Message) -> None:
        self.messages.append(message)

    def step(self) -> float | None:
        self.stepped.release()
        delay = self.delays.pop(0) if self.delays else None
        if isinstance(delay, Exception):
            raise delay
        return delay

    def fail(self, reason: str) -> None:
        self.reason = reason
        self.failed.set()


def a_driver(*actors: Recorder) -> tuple[TransferDriver, MemoryBackend]:
    backend = MemoryBackend("a", MemoryFabric(ManualClock()))
    return TransferDriver(backend, actors), backend


def test_one_round_hands_every_message_to_every_actor_and_returns_the_shortest_delay() -> None:
    first, second = Recorder(None), Recorder(0.5)
    driver, backend = a_driver(first, second)
    backend.notify("a", b"x")
    assert driver.run_once() == 0.5
    assert first.messages == second.messages == [Message("a", b"x")]
    assert driver.run_once() is None


def test_the_thread_steps_when_it_is_woken_and_ends_when_it_is_closed() -> None:
    actor = Recorder(0.0, 0.0001, 0.002)
    driver, _ = a_driver(actor)
    driver.start()
    for _ in range(4):
        assert actor.stepped.acquire(timeout=5)
    actor.wake()
    assert actor.stepped.acquire(timeout=5)
    driver.close()
    assert driver.failure is None


class DeafBackend(MemoryBackend):
    """Its transport reports one peer's broken connection."""

    def messages(self) -> Sequence[Message]:
        raise TransferError("broken")


def test_a_transport_error_while_receiving_does_not_end_the_driver() -> None:
    driver = TransferDriver(DeafBackend("a", MemoryFabric(ManualClock())), [Recorder(0.5)])
    assert driver.run_once() == 0.5


def test_an_unexpected_error_reaches_the_actors() -> None:
    actor = Recorder(ValueError("boom"))
    driver, _ = a_driver(actor)
    driver.start()
    assert actor.failed.wait(5)
    assert actor.reason == driver.failure == "ValueError: boom"
    driver.close()

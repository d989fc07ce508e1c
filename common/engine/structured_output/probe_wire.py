"""What engine, probe server and probe say to each other: msgpack frames behind a 4-byte length, over sockets.

Owns: the message types and the framing. Does not know processes or limits.
"""

import socket
import struct
from enum import Enum
from typing import TypeVar

import msgspec

from common.wire.constraint import Constraint

MessageT = TypeVar("MessageT")

_LENGTH = struct.Struct("<I")


class ProbeVocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """First frame on the control channel, engine to server: the token table; see `Vocabulary`."""

    token_bytes: list[bytes]
    special_token_ids: list[int]
    end_token_id: int
    description: str | None


class Load(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Control: load a backend into the server, so that its forks have it. Answered by `Loaded`."""

    backend: str


class Fork(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Control: fork a probe that serves the one channel sent along with this frame. Not answered here."""


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """The backend is there; `reason` says why not."""

    reason: str = ""


class ProbeJob(msgspec.Struct, frozen=True, kw_only=True):
    """Job channel: compile this, and throw away what cannot be handed over.

    Attributes:
        backend: who shall compile; already loaded.
        constraint: what.
        memory_bytes: address space the job may add.
        cpu_s: CPU seconds after which the kernel ends the probe, should nobody be left to end it.
    """

    backend: str
    constraint: Constraint
    memory_bytes: int
    cpu_s: int


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """Job channel, first frame of the probe: its process id, for whoever has to end it."""

    pid: int


class ProbeVerdict(Enum):
    """How a probe ended."""

    COMPILED = "compiled"
    REJECTED = "rejected"
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"
    CRASHED = "crashed"


class ProbeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Job channel, last frame of the probe; the engine makes the verdicts a dead probe cannot send.

    Attributes:
        verdict: how it ended.
        reason: why, when it was not compiled.
        compile_s: seconds of the compile itself.
        worst_fill_s: slowest mask of a short walk through the grammar.
        num_bytes: memory that the grammar holds, as its backend estimates.
        packed: the grammar, of a backend that can hand it over (`PortableBackend`) and not too large for that.
    """

    verdict: ProbeVerdict
    reason: str = ""
    compile_s: float = 0.0
    worst_fill_s: float = 0.0
    num_bytes: int = 0
    packed: bytes | None = None


def send(channel: socket.socket, message: msgspec.Struct, descriptors: tuple[int, ...] = ()) -> None:
    """Write one frame, with file descriptors. Raises `OSError` when the other side is gone or the timeout passes."""
    payload = msgspec.msgpack.encode(message)
    frame = _LENGTH.pack(len(payload)) + payload
    if descriptors:
        sent = socket.send_fds(channel, [frame], list(descriptors))
        frame = frame[sent:]
    channel.sendall(frame)


def receive(channel: socket.socket, message_type: type[MessageT]) -> MessageT:
    """Read one frame.

    Raises:
        EOFError: the other side is gone.
        TimeoutError: the socket's timeout passed.
    """
    (length,) = _LENGTH.unpack(_exactly(channel, _LENGTH.size))
    return msgspec.msgpack.decode(_exactly(channel, length), type=message_type)


def receive_control(channel: socket.socket) -> tuple[Load | Fork, list[int]]:
    """Read one control frame and the descriptors that came with it. Raises `EOFError`."""
    header, descriptors, _, _ = socket.recv_fds(channel, _LENGTH.size, 1)
    if not header:
        raise EOFError("the engine closed the control channel")
    (length,) = _LENGTH.unpack(header + _exactly(channel, _LENGTH.size - len(header)))
    return msgspec.msgpack.decode(_exactly(channel, length), type=Load | Fork), descriptors


def _exactly(channel: socket.socket, length: int) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        part = channel.recv(min(length - len(parts), 1 << 20))
        if not part:
            raise EOFError("the other side closed the channel")
        parts += part
    return bytes(parts)

"""Messages from D to P that ride on the transfer agent.

Owns: the messages and their bytes. Journey rows 5 to 7 and x.
Does not know: who handles them.
"""

import msgspec

from common.ids import LeaseId


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """D is connected."""


class Attend(msgspec.Struct, frozen=True, tag="attend"):
    """D is reading over a transport that needs P's help: poll often until the lease ends."""

    lease_id: LeaseId


class Heartbeat(msgspec.Struct, frozen=True, tag="beat"):
    """D still wants these leases."""

    lease_ids: tuple[LeaseId, ...]


class Done(msgspec.Struct, frozen=True, tag="done"):
    """D has read and confirmed everything it wants."""

    lease_id: LeaseId


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """D will never read (again)."""

    lease_id: LeaseId


Notification = Hello | Attend | Heartbeat | Done | Abort

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Notification)


def encode(message: Notification) -> bytes:
    """One message as bytes (msgpack)."""
    return _ENCODER.encode(message)


def decode(payload: bytes) -> Notification | None:
    """The message, or None for bytes that are none of ours."""
    try:
        return _DECODER.decode(payload)
    except msgspec.DecodeError:  # covers ValidationError
        return None
